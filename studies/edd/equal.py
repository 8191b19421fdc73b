"""Rivals and variants of EDD after trainings of one length, each at the learning rate best at that length.

    python -m studies.edd.equal
    python -m studies.edd.equal --kinds edd eagle      these alone; what is trained is not trained again

The figures of equal trainings in topic `flagship` are of these trainings (`studies/figures/drafters.py`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from drafttrain.data.config import Source
from studies.arguments import start
from studies.edd.bench import (
    DRAFTER,
    RATES,
    SEEDS,
    TRAINING,
    Bench,
    best,
    run_study,
    several_seeds,
    summarize,
)

STEPS = 5000  # of 2,048 tokens: about three passes
TEXT = "data/train/answers.parquet"  # the target's, of up to 256 tokens
EVALUATIONS = 8  # of each training, for curves of accept_len against tokens (`studies/edd/curves.py`)
TAPPED = [6, 14, -4]  # whose states all kinds read some of
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
    "edd-5-to-10": ({}, {"block_length": (5, 10)}),  # the paper's blocks
    "edd-2-layers": ({"layers": 2}, {}),
    "edd-anchored-2-layers": ({"anchor": True, "layers": 2}, {}),
    "edd-3-taps": ({"tapped_blocks": [6, 14, -4]}, {}),
    "edd-frozen-head": ({"train_head": False}, {}),
    "edd-12k": ({"draft_vocab_size": 12288}, {}),
    "edd-16k": ({"draft_vocab_size": 16384}, {}),
    "edd-mixed": ({}, {"argmax_share": 0.3, "unreached_weight": 0.3}),
}


def equal(bench: Bench, kinds: Sequence[str] = tuple(EQUAL)) -> dict[str, Any]:
    """Train rivals and ablations for one length on the same text, each at the rate that is best at that
    length; `commits` are those at which accept_len was measured."""
    made_from = bench.states("equal", [Source(TEXT)], TAPPED)
    rows, rates = {}, {}
    for name in kinds:
        shape, changes = EQUAL[name]
        drafter = replace(DRAFTER, **shape)
        training = replace(TRAINING, max_steps=STEPS, eval_steps=STEPS // EVALUATIONS, **changes)
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
    results = [one for own in rows.values() for one in own]
    commits = sorted({str(one.get("decoded_at", one["commit"])) for one in results})
    return {"rows": summarize(rows), "validation accept_len by rate": rates, "commits": commits}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study; return the exit status."""
    return run_study(equal, __doc__, argv, tuple(EQUAL))


if __name__ == "__main__":
    start(main)
