"""EDD against the drafters that its paper compares it with, and against itself with one thing left out.

All are trained for one length, each at the learning rate that is best at that length, from three seeds.
Trains what `studies/edd/equal.py` trains, or takes what is under `runs/baselines` already.
"""

from pathlib import Path
from typing import Any

from studies.edd.bench import LONG_STEPS, SEEDS, Bench
from studies.edd.equal import equal
from studies.goals import FIRST_TURNS, Group, Measured, Run, Size

OUT = Path("runs/baselines")
PROMPTS = 80  # of each task
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
    """accept_len of EDD over that of each rival and ablation, means over seeds."""
    loaded = bench(run)
    rows = equal(loaded)["rows"]
    prompts = {task: len(ids) for task, ids in loaded.prompts.items()}
    notes = {"steps": LONG_STEPS}
    return {
        figure: {**compared(rows[ours], rows[theirs], prompts), **notes}
        for figure, (ours, theirs) in COMPARED.items()
    }


def compared(ours: dict[str, Any], theirs: dict[str, Any], prompts: dict[str, int]) -> dict[str, Any]:
    """A ratio of means, its interval the worst and best ratio of single seeds; and the ratios by task."""
    return {
        "value": ours["accept_len"] / theirs["accept_len"],
        "interval": [ours["range"][0] / theirs["range"][1], ours["range"][1] / theirs["range"][0]],
        "tasks": {task: ours["tasks"][task] / theirs["tasks"][task] for task in ours["tasks"]},
        "accept_len": [ours["accept_len"], theirs["accept_len"]],
        "lr": [ours["lr"], theirs["lr"]],
        "size": {"prompts": prompts, "seeds": min(len(ours["seeds"]), len(theirs["seeds"]))},
    }


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
    ),
]
