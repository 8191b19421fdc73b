"""Full disks, short writes, failed renames and syncs, and signals, at a chosen call of a command: by a
library (faults.c) that is loaded before all others."""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

SOURCE = Path(__file__).with_name("faults.c")
FAULTS = {
    "kill": 1,
    "full disk": 2,
    "short write": 3,
    "failed rename": 4,
    "failed sync": 5,
    "interrupt": 6,
    "terminate": 7,
}
CALLS = ("writes", "renames", "syncs")
OF = {"full disk": "writes", "short write": "writes", "failed rename": "renames", "failed sync": "syncs"}


def build(folder: Path) -> Path | None:
    """Compile the library; return its file, None without a C compiler."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None or sys.platform != "linux":
        return None
    library = folder / "faults.so"
    words = [compiler, "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"]
    subprocess.run(words, check=True, capture_output=True)
    return library


def is_loaded() -> bool:
    """Return whether this process was started with the library."""
    return "faults.so" in os.environ.get("LD_PRELOAD", "")


def restart(folder: Path, argv: Sequence[str]) -> None:
    """Replace this process by one with the library.

    Raises:
        RuntimeError: there is no C compiler.
    """
    if (library := build(folder)) is None:
        raise RuntimeError("cc: must be there to build the layer of faults, got none")
    os.execve(sys.executable, [sys.executable, *argv], {**os.environ, "LD_PRELOAD": str(library)})


def arming(folder: Path, fault: str | None, number: int, counts: Path) -> Callable[[], Callable[[], None]]:
    """Return what a case's process calls first, which returns what it calls last.

    Args:
        folder: below which calls count.
        fault: of FAULTS; None: nothing fails.
        number: which call fails, from 1.
        counts: file that gets the numbers of CALLS, in a process that ends by itself.
    """

    def begin() -> Callable[[], None]:
        layer = ctypes.CDLL(os.environ["LD_PRELOAD"])
        layer.fault_seen.restype = ctypes.c_long
        layer.fault_arm(str(folder).encode(), FAULTS.get(fault, 0), ctypes.c_long(number))

        def end() -> None:
            counts.write_text(" ".join(str(layer.fault_seen(i)) for i in range(len(CALLS))))

        return end

    return begin
