"""EDD against the drafters that its paper compares it with, and against itself with one thing left out.

All are trained for one length, each at the learning rate that is best at that length, from three seeds.
Trains those kinds of `studies/edd/equal.py` that are compared here, or takes what is under `runs/baselines`
already.
"""

from pathlib import Path
from typing import Any

import numpy as np

from studies.edd.bench import SEEDS, Bench
from studies.edd.equal import EQUAL, STEPS, equal
from studies.goals import FIRST_TURNS, Group, Measured, Run, Size

OUT = Path("runs/baselines")
PROMPTS = 80  # of each task
RESAMPLES = 1000
COMPARED = {
    "edd_vs_eagle": ("edd", "eagle"),
    "edd_vs_eagle_mtp": ("edd", "eagle-mtp"),
    "best_vs_mtp_eagle": ("edd-anchored", "eagle-mtp"),
    "edd_vs_medusa": ("edd", "medusa"),
    "edd_vs_vdm": ("edd", "vdm"),
    "kl_vs_ce": ("edd", "edd-ce"),
    "states_vs_none": ("edd", "vdm"),
    "random_vs_fixed_blocks": ("edd", "edd-fixed5"),
}
TASKS = FIRST_TURNS | {"gsm8k": PROMPTS, "humaneval": PROMPTS}


def bench(run: Run) -> Bench:
    return Bench(OUT, run.prompts(quick=2, full=PROMPTS), None)


def equally_trained(run: Run) -> Measured:
    """Compare accept_len of EDD with that of each rival and ablation, means over seeds; the record names the
    commits of results that were there already. Only what the wanted figures compare is trained."""
    loaded = bench(run)
    pairs = {figure: pair for figure, pair in COMPARED.items() if not run.only or figure in run.only}
    kinds = {kind for pair in pairs.values() for kind in pair}
    found = equal(loaded, [kind for kind in EQUAL if kind in kinds])
    rows = found["rows"]
    prompts = {task: len(ids) for task, ids in loaded.prompts.items()}
    notes = {"steps": STEPS, "commits": found["commits"]}
    return {
        figure: {**compared(rows[ours], rows[theirs], prompts), **notes}
        for figure, (ours, theirs) in pairs.items()
    }


def compared(ours: dict[str, Any], theirs: dict[str, Any], prompts: dict[str, int]) -> dict[str, Any]:
    """Return a ratio of means over seeds, its interval over prompts and seeds, and the ratios by task."""
    return {
        "value": ours["accept_len"] / theirs["accept_len"],
        "interval": interval(ours["by_prompt"], theirs["by_prompt"]),
        "seeds": [ours["range"], theirs["range"]],
        "tasks": {task: ours["tasks"][task] / theirs["tasks"][task] for task in ours["tasks"]},
        "accept_len": [ours["accept_len"], theirs["accept_len"]],
        "lr": [ours["lr"], theirs["lr"]],
        "size": {"prompts": prompts, "seeds": min(len(ours["seeds"]), len(theirs["seeds"]))},
    }


def interval(ours: dict[str, list], theirs: dict[str, list]) -> list[float]:
    """Return the 95 % interval of a ratio of mean accept_lens: percentile bootstrap (1,000 resamples, fixed
    seed) over prompts, which both decode and so are drawn together, and over each one's seeds.

    Args:
        ours, theirs: tokens emitted by steps and steps, by task, seed and prompt.
    """
    random = np.random.default_rng(0)
    prompts = {task: len(rows[0]) for task, rows in ours.items()}
    drawn = {task: random.integers(n, size=(RESAMPLES, n)) for task, n in prompts.items()}
    means = []
    for counts in (ours, theirs):
        sums = 0
        for task, rows in counts.items():
            by_seed = np.array(rows)  # [seeds, prompts, 2]
            sums = sums + by_seed[:, drawn[task]].sum(2)  # [seeds, RESAMPLES, 2]
        lengths = sums[..., 0] / sums[..., 1]  # [seeds, RESAMPLES]
        chosen = random.integers(len(lengths), size=lengths.shape)  # seeds
        means.append(np.take_along_axis(lengths, chosen, 0).mean(0))
    return np.quantile(means[0] / means[1], [0.025, 0.975]).tolist()


GROUPS = [
    Group(
        {
            "edd_vs_eagle": ">= 1.0",
            "edd_vs_eagle_mtp": ">= 1.0",
            "best_vs_mtp_eagle": "> 1.0",
            "edd_vs_medusa": ">= 1.0",
            "edd_vs_vdm": ">= 1.0",
            "kl_vs_ce": "> 1.0",
            "states_vs_none": "> 1.0",
            "random_vs_fixed_blocks": "> 1.0",
        },
        equally_trained,
        long=True,
        size=Size(TASKS, seeds=len(SEEDS)),
        floors=dict.fromkeys(("edd_vs_eagle", "edd_vs_medusa", "edd_vs_vdm"), 0.99),
    ),
]
