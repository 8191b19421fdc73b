"""EDD against the drafters that its paper compares it with, and against itself with one thing left out.

Trains what `scripts/baselines.py` trains, or takes what lies under `runs/baselines` already.
"""

from pathlib import Path
from typing import Any

import baselines

from drafttrain.evaluation.figures import Group, Measured, Run

OUT = Path("runs/baselines")
PROMPTS = 14  # of each task
ABLATIONS = {
    "kl_vs_ce": "cross-entropy with the text",
    "states_vs_none": "no target states",
    "random_vs_fixed_blocks": "blocks of 5",
}


def bench(run: Run) -> baselines.Bench:
    return baselines.Bench(OUT, run.prompts(quick=2, full=PROMPTS), None)


def against_eagle(run: Run) -> Measured:
    """accept_len of EDD over EAGLE's after the longest training that both had, means over three seeds; and
    after the short one of `against_others`, where EAGLE is ahead."""
    loaded = bench(run)
    long, short = baselines.long(loaded)["rows"], baselines.table1(loaded, ("edd", "eagle"))["rows"]
    found = {"steps": baselines.LONG_STEPS, **compared(long["edd"], long["eagle"])}
    early = {"steps": baselines.TRAINING.max_steps, **compared(short["edd"], short["eagle"])}
    return {"edd_vs_eagle": {**found, "early": early}}


def against_others(run: Run) -> Measured:
    """accept_len of EDD over that of MEDUSA and of VDM, means over three seeds."""
    rows = baselines.table1(bench(run), ("edd", "medusa", "vdm"))["rows"]
    return {f"edd_vs_{kind}": compared(rows["edd"], rows[kind]) for kind in ("medusa", "vdm")}


def ablations(run: Run) -> Measured:
    """accept_len of EDD over that of EDD with one thing left out."""
    rows = baselines.table3(bench(run))["rows"]
    return {figure: compared(rows["everything"], rows[name]) for figure, name in ABLATIONS.items()}


def compared(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """A ratio of means, how far single seeds would take it, and the same by task."""
    return {
        "value": ours["accept_len"] / theirs["accept_len"],
        "seeds": [ours["range"][0] / theirs["range"][1], ours["range"][1] / theirs["range"][0]],
        "tasks": {task: ours["tasks"][task] / theirs["tasks"][task] for task in ours["tasks"]},
        "accept_len": [ours["accept_len"], theirs["accept_len"]],
        "lr": [ours["lr"], theirs["lr"]],
    }


GROUPS = [
    Group({"edd_vs_eagle": ">= 1.0"}, against_eagle, long=True),
    Group({"edd_vs_medusa": ">= 1.0", "edd_vs_vdm": ">= 1.0"}, against_others, long=True),
    Group(
        {"kl_vs_ce": "> 1.0", "states_vs_none": "> 1.0", "random_vs_fixed_blocks": "> 1.0"},
        ablations,
        long=True,
    ),
]
