"""Hostile files, kills, signals, faults of the disk, and commands at the same time.

Every case must end in one line, and nothing may be lost.

    python -m studies.hostile                            all of it, in two processes
    python -m studies.hostile --every 10                 one case of ten
    python -m studies.hostile --part files kills         files, kills, signals, faults, together

Prints a table for each part, and every case that ended otherwise; tables and all cases go to PART.md and
PART.jsonl in --out.
"""

import json
import multiprocessing
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

from drafttrain.trees.policies import POLICIES
from drafttrain.utils.writing import write_text
from studies import arguments
from studies.hostile import faults, files, together
from studies.hostile.share import Share
from tests.hasty import hasty_calibrations, short_looks
from tests.hostile.cases import make
from tests.hostile.faults import OF, is_loaded, restart

LANES = 2  # processes
Note = Callable[[Any], None]
PARTS: dict[str, Callable[[Path, Share, Note], None]] = {
    "files": files.measure,
    "kills": partial(faults.measure, ["kill"], faults.KILLS),
    "signals": partial(faults.measure, ["interrupt", "terminate"], faults.SIGNALS),
    "faults": partial(faults.measure, list(OF), faults.STRIKES),
    "together": together.measure,
}


def files_row(case: str) -> str:
    """Return the command of a case of `files` with the file, or the kind of the rest, that is hostile."""
    command, what = case.split(": ")[:2]
    if what.startswith("--"):
        return f"{command}: options"
    if what.split(":")[0] in POLICIES:
        return f"{command}: trees"
    if what.split()[-1].isdigit():
        return f"{command}: keys of recipes"
    return f"{command}: {what}" if "." in what else f"{command}: surroundings"


ROWS = {  # what a case is listed under
    "files": lambda one: files_row(one.case),
    "kills": lambda one: one.writer,
    "signals": lambda one: f"{one.writer}, {one.fault}",
    "faults": lambda one: f"{one.writer}, {one.fault}",
    "together": lambda one: one.first if one.first == one.second else f"{one.first}, {one.second}",
}


def table(part: str, found: Sequence[dict[str, Any]]) -> str:
    """Return verdicts by what a part lists, as Markdown."""
    counts: dict[str, Counter] = {}
    for one in found:
        counts.setdefault(one["row"], Counter())[one["verdict"]] += 1
    verdicts = list(dict.fromkeys(verdict for own in counts.values() for verdict in own))
    lines = [f"| {part} | " + " | ".join(verdicts) + " |", "|---" * (len(verdicts) + 1) + "|"]
    for name, own in counts.items():
        lines.append(f"| {name} | " + " | ".join(str(own[verdict]) for verdict in verdicts) + " |")
    return "\n".join(lines)


def run_part(part: str, place: Path, file: Path, share: Share) -> None:
    """Run this process's cases of a part, and write each to a file at once."""
    place.mkdir()
    (place / "world").symlink_to(place.parent / "world")
    with open(file, "w", encoding="utf-8") as lines:

        def note(one: Any) -> None:
            lines.write(json.dumps({**asdict(one), "row": ROWS[part](one)}) + "\n")
            lines.flush()
            if not one.is_right:
                print(f"{part}: {one}", file=sys.stderr, flush=True)

        PARTS[part](place, share, note)


def run_lane(parts: Sequence[str], folder: Path, out: Path, share: Share) -> None:
    """Run this process's cases of all parts."""
    for part in parts:
        run_part(part, folder / f"{part}-{share.lane}", out / f"{part}-{share.lane}.jsonl", share)


def study(args: Namespace) -> None:
    torch.set_num_threads(1)
    parts = args.part or list(PARTS)
    with tempfile.TemporaryDirectory() as name, hasty_calibrations(), short_looks():
        folder = Path(name)
        make(folder / "world")
        forks = multiprocessing.get_context("fork")
        lanes = [
            forks.Process(target=run_lane, args=(parts, folder, args.out, Share(args.every, lane, LANES)))
            for lane in range(LANES)
        ]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()
        if any(lane.exitcode for lane in lanes):
            raise RuntimeError("a process of the study failed; see its traceback")
        for part in parts:
            files = [args.out / f"{part}-{i}.jsonl" for i in range(LANES)]
            text = "".join(file.read_text(encoding="utf-8") for file in files)
            write_text(args.out / f"{part}.jsonl", text)  # whole: that it is there means that all has run
            for file in files:
                file.unlink()
            shown = table(part, [json.loads(line) for line in text.splitlines()]) + "\n"
            write_text(args.out / f"{part}.md", shown)
            print(shown)


def main(argv: Sequence[str] | None = None) -> int:
    if not is_loaded():
        restart(Path(tempfile.mkdtemp()), ["-m", "studies.hostile", *(argv or sys.argv[1:])])
    return arguments.run(study, __doc__, argv, ("every", "part"), "runs/hostile")


if __name__ == "__main__":
    arguments.start(main)
