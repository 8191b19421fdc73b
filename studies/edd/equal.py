"""Rivals and ablations of EDD after trainings of one length, each at the learning rate best at that length.

    python -m studies.edd.equal

The figures of topic `baselines` are of these trainings (`studies/figures/drafters.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from studies.arguments import start
from studies.edd.bench import (
    DRAFTER,
    LONG_STEPS,
    RATES,
    SEEDS,
    TRAINING,
    Bench,
    best,
    many_answers,
    run_study,
    several_seeds,
    summarize,
)

EVALUATIONS = 8  # of each training, for curves of accept_len against tokens (`studies/edd/curves.py`)
# what `equal` trains: settings of the drafter and of its training that differ from EDD's
EQUAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "edd": ({}, {}),
    "edd-anchored": ({"anchor": True}, {}),
    "eagle": ({"kind": "eagle"}, {}),
    "eagle-mtp": ({"kind": "eagle", "input_norms": True}, {}),
    "medusa": ({"kind": "medusa"}, {}),
    "vdm": ({"kind": "vdm"}, {}),  # EDD without the target's states, too
    "edd-ce": ({}, {"loss": "ce"}),
    "edd-fixed5": ({}, {"block_length": (5, 5)}),
}


def equal(bench: Bench, kinds: Sequence[str] = tuple(EQUAL)) -> dict[str, Any]:
    """Rivals and ablations, trained for one length on the same text, each at the rate that is best at that
    length."""
    made_from = many_answers(bench)
    rows, rates = {}, {}
    for name in kinds:
        shape, changes = EQUAL[name]
        drafter = replace(DRAFTER, **shape)
        training = replace(TRAINING, max_steps=LONG_STEPS, eval_steps=LONG_STEPS // EVALUATIONS, **changes)
        trials = {
            rate: bench.trained(
                f"{name}-equal-{rate:g}-seed{SEEDS[0]}",
                drafter,
                replace(training, lr=rate, seed=SEEDS[0]),
                made_from,
            )
            for rate in RATES
        }
        rate = best(list(trials.values()))["lr"]
        rates[name] = {f"{one['lr']:g}": one["validation"]["eval_accept_len"] for one in trials.values()}
        more = replace(training, lr=rate)
        found = several_seeds(bench, f"{name}-equal-{rate:g}", drafter, more, made_from, SEEDS[1:])
        rows[name] = [trials[rate], *found]
    return {"rows": summarize(rows), "validation accept_len by rate": rates}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study; return the exit status."""
    return run_study(equal, __doc__, argv, tuple(EQUAL))


if __name__ == "__main__":
    start(main)
