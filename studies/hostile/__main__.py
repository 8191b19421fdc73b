"""Hostile files, kills, faults of the disk, and commands at the same time.

Every case must end in one line, and nothing may be lost.

    python -m studies.hostile                            all of it, about 40 minutes
    python -m studies.hostile --every 10                 one case of ten
    python -m studies.hostile --part files kills         files, kills, faults, together

Prints a table for each part, and every case that ended otherwise; all cases go to PART.jsonl in --out.
"""

import json
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from studies import arguments
from studies.hostile import faults, files, together
from tests.hostile.cases import make
from tests.hostile.faults import OF, is_loaded, restart

Note = Callable[[Any], None]
PARTS: dict[str, Callable[[Path, int, Note], None]] = {
    "files": files.measure,
    "kills": lambda place, every, note: faults.measure(place, ["kill"], faults.KILLS, every, note),
    "faults": lambda place, every, note: faults.measure(place, list(OF), faults.STRIKES, every, note),
    "together": together.measure,
}
ROWS = {  # what a case is listed under
    "files": lambda one: ": ".join(one.case.split(": ")[:2]),
    "kills": lambda one: one.writer,
    "faults": lambda one: f"{one.writer}, {one.fault}",
    "together": lambda one: one.first if one.first == one.second else f"{one.first}, {one.second}",
}


def table(part: str, found: Sequence[Any]) -> str:
    """Return verdicts by what a part lists, as Markdown."""
    counts: dict[str, Counter] = {}
    for one in found:
        counts.setdefault(ROWS[part](one), Counter())[one.verdict] += 1
    verdicts = list(dict.fromkeys(verdict for own in counts.values() for verdict in own))
    lines = [f"| {part} | " + " | ".join(verdicts) + " |", "|---" * (len(verdicts) + 1) + "|"]
    for name, own in counts.items():
        lines.append(f"| {name} | " + " | ".join(str(own[verdict]) for verdict in verdicts) + " |")
    return "\n".join(lines)


def run_part(part: str, place: Path, out: Path, every: int) -> list[Any]:
    """Run the cases of a part, and write each to its file at once."""
    found: list[Any] = []
    with open(out / f"{part}.jsonl", "w", encoding="utf-8") as file:

        def note(one: Any) -> None:
            found.append(one)
            file.write(json.dumps(asdict(one)) + "\n")
            file.flush()
            if not one.is_right:
                print(f"{part}: {one}", file=sys.stderr)

        PARTS[part](place, every, note)
    return found


def study(args: Namespace) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder) / "world")
        for part in args.part or PARTS:
            place = Path(folder) / part
            place.mkdir()
            (place / "world").symlink_to(Path(folder) / "world")
            print(table(part, run_part(part, place, args.out, args.every)) + "\n")


def main(argv: Sequence[str] | None = None) -> int:
    if not is_loaded():
        restart(Path(tempfile.mkdtemp()), ["-m", "studies.hostile", *(argv or sys.argv[1:])])
    return arguments.run(study, __doc__, argv, ("every", "part"), "runs/hostile")


if __name__ == "__main__":
    arguments.start(partial(main))
