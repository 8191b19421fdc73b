"""Table 3 of the EDD paper, retrained rows: without states, on the text's tokens, with blocks of one length.

    python -m studies.edd.table3

Its rows about trees are `studies/edd/table2.py`.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from studies.arguments import start
from studies.edd.bench import (
    DRAFTER,
    TRAINING,
    Bench,
    answers,
    best_rate,
    run_study,
    several_seeds,
    summarize,
)


def table3(bench: Bench) -> dict[str, Any]:
    """Train EDD with one thing left out."""
    made_from = answers(bench)
    full = replace(TRAINING, lr=best_rate(bench, "edd", made_from)[0])
    rows = {"everything": several_seeds(bench, "edd", DRAFTER, full, made_from)}
    none = replace(TRAINING, lr=best_rate(bench, "vdm", made_from)[0])
    rows["no target states"] = several_seeds(bench, "vdm", replace(DRAFTER, kind="vdm"), none, made_from)
    for what, name, change in (
        ("cross-entropy with the text", "edd-ce", {"loss": "ce"}),
        ("blocks of 5", "edd-fixed5", {"block_length": (5, 5)}),
    ):
        ablated = replace(full, **change)
        rows[what] = several_seeds(bench, name, DRAFTER, ablated, made_from)
    return {"rows": summarize(rows)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study; return the exit status."""
    return run_study(table3, __doc__, argv)


if __name__ == "__main__":
    start(main)
