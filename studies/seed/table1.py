"""Table 1 of the SEED paper: speedup of AR, SD, MCSD and SEED over serial AR, on whole trees of thoughts.

    python -m studies.seed.table1                 pair B: SmolLM2 and the EDD bundle
    python -m studies.seed.table1 --target LARGE.gguf --bundle SMALL.gguf    pair A

Seconds per new token, prompts included; every method shares prefixes alike, and methods take turns on each
problem. Batched methods follow the paper's; a tuned tree of ours closes each task.
"""

import json
from argparse import Namespace
from collections.abc import Sequence

import torch

from drafttrain.kernels.machine import describe_machine
from drafttrain.utils.machine import OtherLoad
from studies import arguments
from studies.seed.comparison import seconds_per_token
from studies.seed.methods import (
    BATCHED_AR,
    SERIAL_AR,
    Grown,
    Method,
    collect,
    drawn,
    scheduled,
    serial,
)
from studies.seed.pairs import load_pair

SHORT, LONG = ((1, 1, 1), (1, 1, 1, 1)), ((1, 1, 1, 1), (1, 1, 1, 1, 1))
K_CONFIGS = {  # chains, then trees, of each task
    "writing": (SHORT, ((2, 2, 1), (4, 2, 1, 1))),
    "gsm8k": (SHORT, ((2, 2, 1), (4, 2, 1, 1))),
    "blocksworld": (LONG, ((2, 2, 1, 1), (8, 2, 1, 1, 1))),
}


def methods(task: str) -> list[Method]:
    """Return the rows of the table for a task."""
    chains, trees = K_CONFIGS[task]
    rows = [serial(SERIAL_AR, None)]
    for k_config in chains:
        rows += [
            serial(f"SD {k_config}", drawn(*k_config)),
            scheduled(f"SEED {k_config}", drawn(*k_config), "one"),
        ]
    for k_config in trees:
        rows += [
            serial(f"MCSD {k_config}", drawn(*k_config)),
            scheduled(f"SEED {k_config}", drawn(*k_config), "one"),
        ]
    rows.append(scheduled(BATCHED_AR, None, "batched"))
    rows += [scheduled(f"SEED batched {k}", drawn(*k), "batched") for k in (*chains, *trees)]
    return rows


def table(found: Sequence[Grown]) -> str:
    """Return the table in Markdown."""
    lines = ["| task | method | speedup | tokens per second | accept_len |", "|---|---|---|---|---|"]
    for task in dict.fromkeys(one.task for one in found):
        own = [one for one in found if one.task == task]
        base = seconds_per_token([one for one in own if one.method == SERIAL_AR])
        for name in dict.fromkeys(one.method for one in own):
            mine = [one for one in own if one.method == name]
            cost = seconds_per_token(mine)
            length = sum(one.accept_len for one in mine) / len(mine)
            lines.append(f"| {task} | {name} | {base / cost:.2f} | {1 / cost:.1f} | {length:.2f} |")
    return "\n".join(lines)


def study(args: Namespace) -> None:
    load = OtherLoad()
    pair = load_pair("A" if args.target else "B", args.target, args.bundle, args.dtype)
    problems = args.limit or (3 if args.target else 8)
    raw = args.out / f"table1_{pair.name}.jsonl"
    found = collect(pair, methods, dict.fromkeys(K_CONFIGS, problems), 3, raw, args.resume)
    print(table(found))
    machine = {**describe_machine(torch.device("cpu")), "load": load.lap(), "dtype": args.dtype}
    (args.out / f"table1_{pair.name}.machine.json").write_text(json.dumps(machine) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    names = ("bundle", "target", "dtype", "limit", "resume")
    return arguments.run(study, __doc__, argv, names, "docs/results/raw/seed", dtype="bfloat16")


if __name__ == "__main__":
    arguments.start(main)
