"""Seconds to the first token and of the short calibration."""

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from drafttrain.calibration.config import CalibrateConfig
from drafttrain.data.config import PromptSet
from drafttrain.data.prompts import Task, read_prompts, spread
from drafttrain.run.calibrate import calibrate
from drafttrain.utils.errors import UserError
from studies.calibrations import quick_against_full
from studies.figures.machine_setting import DRAFTER, MT_BENCH, NEW_TOKENS, REPEATS, TUNING, in_dtype, load
from studies.goals import Measured, Run


def startup(run: Run, folder: Path) -> Measured:
    """Time from the command to its first token, and to its help; medians, after one that warms the disk."""
    run.check_quiet()
    words = [sys.executable, "-m", "drafttrain.run.cli", "generate"]
    answer = [*words, "--bundle", str(DRAFTER), "--prompt", "Why is the sky blue?", "--max-new-tokens", "8"]
    commands = {"help": [*words, "--help"], "first_token": answer}
    repeats = 1 if run.quick else 5
    seconds = {
        name: [command_seconds(command) for _ in range(1 + repeats)][1:] for name, command in commands.items()
    }
    help_s = statistics.median(total for _, total in seconds["help"])
    token_s = statistics.median(first for first, _ in seconds["first_token"])
    return {
        "startup_s": {
            "value": token_s,
            "help_s": help_s,
            "seconds": seconds,
            "ok": help_s <= 1.0,
            "why": f"the help takes {help_s:.2f} s, more than 1.0",
            "size": {"repeats": repeats},
        }
    }


def command_seconds(command: Sequence[str]) -> tuple[float, float]:
    """Return the seconds until a command writes the first byte to standard output, and until it ends.

    Raises:
        UserError: it fails, or writes nothing.
    """
    started = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, bufsize=0) as process:
        output = process.stdout.read(1)
        first = time.perf_counter() - started
        output += process.stdout.read()
    if process.returncode or not output:
        raise UserError(f"{' '.join(command[1:4])}: must print something, got status {process.returncode}")
    return first, time.perf_counter() - started


def quick_calibration(run: Run, folder: Path) -> Measured:
    """Time the short calibration, and `timed` by it against `timed` by a full one."""
    run.check_quiet()
    prompts = PromptSet("tuning", TUNING, 8 if run.quick else 24)
    config = CalibrateConfig(prompts=prompts, rounds=5 if run.quick else 15, busy=run.busy)
    full = calibrate(config, DRAFTER, folder / "full", dtype="auto")
    loaded, n = load(), run.prompts(quick=4, full=20)
    task = Task("mt_bench", spread(read_prompts(MT_BENCH), n))
    repeats = 1 if run.quick else REPEATS
    found = quick_against_full(loaded, full, task, folder, max_new_tokens=NEW_TOKENS, repeats=repeats)
    return {
        "quick_calibration_s": {
            "value": found["seconds"],
            **{name: found[name] for name in ("ratio", "interval", "rates", "tokens_per_second", "flags")},
            "ok": found["ratio"] >= 0.95,
            "why": f"timed by it has {found['ratio']:.3f} of the speed by a full one",
            "size": {"prompts": {"mt_bench": len(task.prompts)}, "repeats": repeats},
            "machine": in_dtype(loaded.target),
        }
    }
