"""Table 1 of the EDD paper: EDD, EAGLE, MEDUSA-1 and VDM as chains of 5, each at its best learning rate.

python -m studies.edd.table1
python -m studies.edd.table1 --kinds eagle medusa        a part, for another process
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

KINDS = ("edd", "eagle", "medusa", "vdm")


def table1(bench: Bench, kinds: Sequence[str] = KINDS) -> dict[str, Any]:
    """Train each kind at its best learning rate, three seeds."""
    made_from, rows, rates = answers(bench), {}, {}
    for kind in kinds:
        rate, trials = best_rate(bench, kind, made_from)
        rates[kind] = {f"{trial['lr']:g}": trial["validation"]["eval_accept_len"] for trial in trials}
        rows[kind] = several_seeds(
            bench, kind, replace(DRAFTER, kind=kind), replace(TRAINING, lr=rate), made_from
        )
    return {"rows": summarize(rows), "validation accept_len by rate": rates}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study; return the exit status."""
    return run_study(table1, __doc__, argv, KINDS)


if __name__ == "__main__":
    start(main)
