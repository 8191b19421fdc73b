"""The figures of the report page: how long it takes from the committed raw data of trees, and how
large it is."""

import os
import subprocess
import sys
import time
from pathlib import Path

from drafttrain.utils.errors import UserError
from studies.goals import Group, Measured, Run

BUNDLE = "model_cards/smollm2-135m-edd"
RAW = Path("docs/results/raw")
TASKS = ("mt_bench", "gsm8k", "humaneval", "summarization", "questions", "alpaca")


def command(out: Path) -> list[str]:
    """Return the command line that makes the page of docs/results/report.html."""
    words = [sys.executable, "-m", "drafttrain.run.cli", "report", str(RAW / "trees"), "--bundle", BUNDLE]
    words += ["--bundle", str(RAW / "c2t"), "--trace", str(RAW / "trace.json"), "--out", str(out)]
    for task in TASKS:
        words += ["--sweep", str(RAW / "c2t" / f"points_{task}.jsonl")]
    return words


def page(run: Run) -> Measured:
    """Make the page by the command line, start of the interpreter included."""
    run.check_quiet()
    folder = run.folder("report")
    out = folder / "report.html"
    started = time.perf_counter()
    with open(folder / "log.txt", "wb") as log:
        status = subprocess.run(command(out), stdout=log, stderr=log, env=dict(os.environ)).returncode
    seconds = time.perf_counter() - started
    if status:
        raise UserError(f"drafttrain report ended with {status}; see {folder / 'log.txt'}")
    text = out.read_text(encoding="utf-8")
    notes = {"figures": text.count('role="img"'), "left_out": text.count('class="missing"')}
    megabytes = out.stat().st_size / 1e6
    return {
        "report_s": {"value": seconds},
        "report_mb": {"value": megabytes, "ok": notes["left_out"] == 0, **notes},
    }


GROUPS = [Group({"report_s": "<= 20", "report_mb": "<= 3"}, page)]
