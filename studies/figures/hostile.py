"""The figures of topic `hostile`: damaged files, kills, faults of the disk, and two commands at once.

Estimated minutes at full size on 2 cores: files 20, kills 5, signals 3, faults 10, commands at once 5. None
is sensitive to load, but a busy machine may make a case look like a hang.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Collection
from typing import Any

from studies import ROOT
from studies.goals import Group, Measured, Run

QUICK = 60  # one case of this many in quick runs
RESUMED = ("resumed", "absorbed")  # as a disturbed command should end
NOUNS = {"kills": "kills", "signals": "signals", "faults": "faults", "together": "pairs"}  # of the cases


def part(run: Run, name: str) -> list[dict[str, Any]]:
    """Run a part of `python -m studies.hostile` and return its cases; a whole one of a resumed run stays.

    Raises:
        RuntimeError: it failed.
    """
    out = run.folder(f"hostile_{name}")
    words = ["--part", name, "--every", str(QUICK if run.quick else 1), "--out", str(out.resolve())]
    cases = out / f"{name}.jsonl"  # which is there when all are
    if not (run.resume and cases.exists()):
        with open(out / f"{name}.log", "w") as log:
            command = [sys.executable, "-m", "studies.hostile", *words]
            status = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode
        if status:
            raise RuntimeError(f"{out / name}.log: studies.hostile must end with 0, got {status}")
    return [json.loads(line) for line in cases.read_text(encoding="utf-8").splitlines()]


def files(run: Run) -> Measured:
    """Count how commands end that read damaged files."""
    found = part(run, "files")
    verdicts = Counter(one["verdict"] for one in found)
    wrong = [one["case"] for one in found if one["verdict"] not in ("refused", "done")]
    notes = {"cases": len(found), "verdicts": dict(verdicts), "wrong": wrong[:20], **run.quick_note}
    counts = {
        "hostile_cases": len(found),
        "tracebacks": verdicts["traceback"] + verdicts["lines"],
        "hangs": verdicts["hang"],
        "wrong_successes": verdicts["wrong success"],
        "foreign_files_touched": verdicts["touched"],
        "code_executed": verdicts["executed"],
    }
    return {name: {"value": value, **notes} for name, value in counts.items()}


def wrong_ones(run: Run, name: str, right: Collection[str]) -> tuple[int, dict[str, Any]]:
    """Return how many cases of a part end otherwise than right, and notes with the number of all and some."""
    found = part(run, name)
    wrong = [one for one in found if one["verdict"] not in right]
    return len(wrong), {"wrong": wrong[:20], NOUNS[name]: len(found), **run.quick_note}


def kills(run: Run) -> Measured:
    """Return the share of killed commands that leave, run again, what an undisturbed one leaves."""
    wrong, notes = wrong_ones(run, "kills", RESUMED)
    return {"kills_resumed_equal": {"value": 1 - wrong / max(notes["kills"], 1), **notes}}


def signals(run: Run) -> Measured:
    """Count the commands that Ctrl-C or SIGTERM on a terminal does not end in one line, or that leave, run
    again, something else than an undisturbed one."""
    wrong, notes = wrong_ones(run, "signals", RESUMED)
    return {"signals_wrong": {"value": wrong, **notes}}


def faults(run: Run) -> Measured:
    """Count what full disks, short writes, failed renames and failed syncs lose."""
    wrong, notes = wrong_ones(run, "faults", RESUMED)
    return {"fault_injections": {"value": wrong, **notes}}


def together(run: Run) -> Measured:
    """Count what two commands at once spoil."""
    wrong, notes = wrong_ones(run, "together", ("right",))
    return {"concurrent_corruptions": {"value": wrong, **notes}}


GROUPS = [
    Group(
        {
            "hostile_cases": ">= 2000",
            "tracebacks": "== 0",
            "hangs": "== 0",
            "wrong_successes": "== 0",
            "foreign_files_touched": "== 0",
            "code_executed": "== 0",
        },
        files,
    ),
    Group({"kills_resumed_equal": "== 1"}, kills),
    Group({"signals_wrong": "== 0"}, signals),
    Group({"fault_injections": "== 0"}, faults),
    Group({"concurrent_corruptions": "== 0"}, together),
]
