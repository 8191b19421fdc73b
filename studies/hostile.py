"""Hostile input: every file that a command reads, damaged in every way, must end in one line.

    python -m studies.hostile                    all cases
    python -m studies.hostile --every 10         one of ten

Prints a table by command and file, and every case that ended otherwise; all outcomes go to outcomes.jsonl
in --out.
"""

import json
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from drafttrain.utils.progress import counted
from studies import arguments
from tests.hostile.cases import cases, make
from tests.hostile.runner import Outcome, run


def measure(place: Path, every: int) -> list[Outcome]:
    """Run all cases, or one of `every`, one after the other."""
    torch.set_num_threads(1)
    world = place / "world"
    make(world)
    chosen, outcomes = list(cases(world, every)), []
    with counted("hostile", len(chosen), "cases") as step:
        for number, case in enumerate(chosen):
            outcomes.append(run(case, world, place / str(number)))
            step(1)
    return outcomes


def table(outcomes: Sequence[Outcome]) -> str:
    """Return verdicts by command and file, as Markdown."""
    counts: dict[str, Counter] = {}
    for one in outcomes:
        counts.setdefault(": ".join(one.case.split(": ")[:2]), Counter())[one.verdict] += 1
    verdicts = list(dict.fromkeys(verdict for own in counts.values() for verdict in own))
    lines = ["| command and file | " + " | ".join(verdicts) + " |", "|---" * (len(verdicts) + 1) + "|"]
    for name, own in counts.items():
        lines.append(f"| {name} | " + " | ".join(str(own[verdict]) for verdict in verdicts) + " |")
    return "\n".join(lines)


def study(args: Namespace) -> None:
    with tempfile.TemporaryDirectory() as place:
        outcomes = measure(Path(place), args.every)
    rows = "".join(json.dumps(asdict(one)) + "\n" for one in outcomes)
    (args.out / "outcomes.jsonl").write_text(rows, encoding="utf-8")
    for one in outcomes:
        if not one.is_right:
            last = one.error.strip().splitlines()[-1:] or [""]
            print(f"{one.verdict}: {one.case} ({one.seconds} s): {last[0][:200]}")
    print(table(outcomes))


def main(argv: Sequence[str] | None = None) -> int:
    return arguments.run(study, __doc__, argv, ("every",), "runs/hostile")


if __name__ == "__main__":
    arguments.start(main)
