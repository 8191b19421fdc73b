"""Peak memory while something runs.

It covers the whole process: every loaded model counts, used or not. On a GPU it is what torch has allocated
there, on Linux without one the resident memory of the process; elsewhere it is unknown.
"""

from pathlib import Path

import torch

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def reset_peak(device: torch.device) -> bool:
    """Begin a new peak at what is in use now; return False where the system cannot."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        CLEAR.write_text("5")  # resets VmHWM (proc_pid_clear_refs(5))
    except OSError:
        return False
    return True


def peak_bytes(device: torch.device) -> int | None:
    """Return the most memory in use since the last reset, or since the process began; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    kilobytes = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    return None if kilobytes is None else 1024 * int(kilobytes)


def covered(device: torch.device) -> str:
    """Return what the numbers cover, for the record."""
    if device.type == "cuda":
        return "allocated by torch on the GPU, everything that is loaded included"
    return "resident memory of the process, everything that is loaded included"
