"""Tables 1 and 3 of the SEED paper: speedup of AR, SD, MCSD and SEED over serial AR, on trees of thoughts.

    python -m studies.seed.table1                 Table 1: SmolLM2 and the EDD bundle (pair B)
    python -m studies.seed.table1 --target LARGE.gguf --bundle SMALL.gguf    Table 3: pair A on writing

Seconds per new token, prompts included; every method shares prefixes alike, and methods take turns on each
problem. Chains are SD and MCSD alike: with one candidate of each token they are the same. Batched methods
follow the paper's, and rows of the trees of drafts that the figures' tuning chose (TUNED), where they are
none of the paper's.
"""

from argparse import Namespace
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from drafttrain.kernels.machine import describe_machine
from drafttrain.utils.machine import OtherLoad
from drafttrain.utils.writing import write_json
from studies import arguments
from studies.seed.comparison import interval, seconds_per_token, total
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
from studies.seed.pairs import DEFAULTS, load_pair

SHORT, LONG = ((1, 1, 1), (1, 1, 1, 1)), ((1, 1, 1, 1), (1, 1, 1, 1, 1))
K_CONFIGS = {  # chains, then trees, of each task
    "writing": (SHORT, ((2, 2, 1), (4, 2, 1, 1))),
    "gsm8k": (SHORT, ((2, 2, 1), (4, 2, 1, 1))),
    "blocksworld": (LONG, ((2, 2, 1, 1), (8, 2, 1, 1, 1))),
}
TUNED = drawn(2, 2, 1), drawn(1, 1, 1)  # of MCSD and SEED, and batched: tuning_B_seventh_try.json
EVERY_ANSWER = 0  # what is verified one at a time drafts for short answers, too, as in the paper and TUNED


def methods(task: str) -> list[Method]:
    """Return the rows of the table for a task."""
    chains, trees = K_CONFIGS[task]
    rows = [serial(SERIAL_AR, None)]
    for name, k_configs in (("SD", chains), ("MCSD", trees)):
        rows += [row for k in k_configs for row in _one_by_one(f"{name} {k}", f"SEED {k}", drawn(*k))]
    rows.append(scheduled(BATCHED_AR, None, "batched"))
    rows += [scheduled(f"SEED batched {k}", drawn(*k), "batched") for k in (*chains, *trees)]
    one, batched = TUNED
    published = {drawn(*k) for k in (*chains, *trees)}
    if one not in published:
        rows += _one_by_one("MCSD tuned", "SEED tuned", one)
    if batched not in published:
        rows.append(scheduled("SEED batched tuned", batched, "batched"))
    return rows


def _one_by_one(serial_name: str, seed_name: str, tree: str) -> list[Method]:
    return [
        serial(serial_name, tree, short=EVERY_ANSWER),
        scheduled(seed_name, tree, "one", short=EVERY_ANSWER),
    ]


def summary(found: Sequence[Grown]) -> dict[str, dict[str, Any]]:
    """Return the numbers of the table by task and method, over the problems that every method with trees of
    the task has grown as often: an interrupted run has others, too. Nothing of a task without serial AR."""
    rows = {}
    for task in dict.fromkeys(one.task for one in found):
        trees = [one for one in found if one.task == task]
        present = {one.method for one in trees}
        names = [method.name for method in methods(task) if method.name in present]
        trees = [one for one in trees if one.method in names]
        grown = Counter((one.repeat, one.problem) for one in trees)
        own = [one for one in trees if grown[one.repeat, one.problem] == len(names)]
        if not own or SERIAL_AR not in names:
            continue
        base = seconds_per_token([one for one in own if one.method == SERIAL_AR])
        problems, repeats = ({getattr(one, key) for one in own} for key in ("problem", "repeat"))
        rows[task] = {"problems": len(problems), "repeats": len(repeats)}
        for name in names:
            mine = [one for one in own if one.method == name]
            cost = seconds_per_token(mine)
            length = total(mine).accept_len
            row = {"speedup": base / cost, "tokens_per_second": 1 / cost, "accept_len": length}
            both = [one for one in own if one.method in (SERIAL_AR, name)]
            bounds = interval(both, partial(_speedup, name=name))
            rows[task][name] = {key: round(value, 4) for key, value in row.items()}
            rows[task][name]["interval"] = [round(bound, 4) for bound in bounds]
    return rows


def _speedup(grown: Sequence[Grown], name: str) -> float:
    base, own = (
        seconds_per_token([one for one in grown if one.method == method]) for method in (SERIAL_AR, name)
    )
    return base / own


def table(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the table in Markdown."""
    lines = ["| task | method | speedup | 95 % over problems | tokens per second | accept_len |"]
    lines.append("|---|---|---|---|---|---|")
    for task, row in rows.items():
        for name, one in row.items():
            if isinstance(one, dict):
                numbers = (
                    f"{one['speedup']:.2f} | {one['interval'][0]:.2f} to {one['interval'][1]:.2f} | "
                    f"{one['tokens_per_second']:.1f} | {one['accept_len']:.2f}"
                )
                lines.append(f"| {task} | {name} | {numbers} |")
    return "\n".join(lines)


def study(args: Namespace) -> None:
    load = OtherLoad()
    pair = load_pair("A" if args.target else "B", args.target, args.bundle, args.dtype)
    problems = args.limit or (3 if args.target else 8)
    raw = args.out / f"table1_{pair.name}.jsonl"
    tasks = ["writing"] if args.target else list(K_CONFIGS)  # as the paper's Table 3 and Table 1
    found = collect(pair, methods, dict.fromkeys(tasks, problems), 3, raw, args.resume)
    rows = summary(found)
    print(table(rows))
    write_json(args.out / f"table1_{pair.name}_summary.json", rows)
    machine = {**describe_machine(torch.device("cpu")), "load": load.lap(), "dtype": args.dtype}
    write_json(args.out / f"table1_{pair.name}.machine.json", machine)


def main(argv: Sequence[str] | None = None) -> int:
    names = ("bundle", "target", "dtype", "limit", "resume")
    return arguments.run(study, __doc__, argv, names, "docs/results/raw/seed", **DEFAULTS)


if __name__ == "__main__":
    arguments.start(main)
