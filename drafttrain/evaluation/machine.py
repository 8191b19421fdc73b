"""What a measurement depends on besides the code: the machine, its threads, and who else uses it.

With two threads on two busy cores one forward was seen to take 1.9 s instead of 25 ms: threads that wait for
each other are not scheduled together. So timings look at what other processes do before and while they run.
"""

import os
import platform
import time
from pathlib import Path

import torch

from drafttrain.errors import UserError

STAT = Path("/proc/stat")
BUSY = 0.25  # cores taken by other processes above which timings mean little


class OtherLoad:
    """Counts the cores that other processes take from our threads.

    Work on cores that we leave idle does not count: with 1 thread on 2 cores, another process may use one.
    """

    def __init__(self) -> None:
        self._last = self._read()

    def lap(self) -> float | None:
        """Mean number of cores taken from us since the last lap; None where the system does not tell."""
        before, self._last = self._last, self._read()
        if before is None or self._last is None:
            return None
        wall, busy, own = (after - earlier for after, earlier in zip(self._last, before))
        if wall <= 0:
            return None
        spare = (os.cpu_count() or 1) - torch.get_num_threads()
        return max(0.0, (busy - own) / wall - spare)

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Seconds: the clock, CPU time of all processes, CPU time of this one."""
        try:
            fields = [int(word) for word in STAT.read_text().split("\n", 1)[0].split()[1:]]
        except (OSError, ValueError):
            return None
        user, nice, system, _, _, irq, softirq, steal = (*fields, *[0] * 8)[:8]
        busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy, time.process_time()


def check_quiet(refuse: bool, seconds: float = 2.0) -> str | None:
    """Looks for `seconds` whether other processes would spoil timings.

    Args:
        refuse: raise if they would, instead of returning a warning.

    Returns:
        a warning in one line, or None.

    Raises:
        UserError: `refuse`, and the machine is busy.
    """
    load = OtherLoad()
    time.sleep(seconds)
    taken = load.lap()
    if taken is None or taken <= BUSY:
        return None
    problem = f"other processes take {taken:.1f} of the {torch.get_num_threads()} cores that are to be timed"
    if refuse:
        raise UserError(f"{problem}: end them, or set OMP_NUM_THREADS lower and repeat")
    return problem


def describe_machine(device: torch.device) -> dict[str, str | int]:
    """Processor, cores, threads in use and device, for the record."""
    described: dict[str, str | int] = {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        described["gpu"] = torch.cuda.get_device_name(device)
    return described


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n")
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
