"""Measure a part of the machine's figures in its own process, natively or as if it had AVX2 alone."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from drafttrain.utils.files import read_json
from studies.goals import Measured, Run

AVX2 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
MODULE = "studies.figures.machine"  # measures one part in its process


def column(part: str, avx2: bool = False) -> Callable[[Run], Measured]:
    """Return what measures a part's figures in a process of its own, under their names in one column."""

    def run_column(run: Run) -> Measured:
        suffix = "_avx2" if avx2 else ""
        folder = run.folder(f"machine_{part}{suffix}")
        found = in_process_of_its_own(part, run, folder, AVX2 if avx2 else {})
        return {f"{name}{suffix}": figure for name, figure in found.items()}

    return run_column


def in_process_of_its_own(part: str, run: Run, folder: Path, environment: Mapping[str, str]) -> Measured:
    """Measure a part in another process; a finished one of a resumed run is not measured again.

    Raises:
        RuntimeError: it failed; its messages are on standard error.
    """
    out = folder / "figures.json"
    asked = {"limit": run.limit, "quick": run.quick}
    if run.resume and out.exists():
        done = read_json(out)
        missing = {"error", "skipped"}
        if done["asked"] == asked and not any(missing & one.keys() for one in done["figures"].values()):
            return done["figures"]
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", MODULE, part, str(folder), json.dumps(asdict(run))]
    status = subprocess.run(command, env={**os.environ, **environment}, stdout=2).returncode
    if status:
        raise RuntimeError(f"{part} ended with {status}; see the messages above")
    return read_json(out)["figures"]
