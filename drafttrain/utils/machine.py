"""Load of the machine by other processes while something is measured.

With two threads on two busy cores one forward was seen to take 1.9 s instead of 25 ms: threads that wait for
each other are not scheduled together. So the load of other processes is checked before and during timings.
"""

import os
import time
from pathlib import Path

import torch

from drafttrain.utils.errors import UserError

STAT = Path("/proc/stat")
BUSY = 0.25  # cores taken by other processes above which timings mean little
LOOK = 2.0  # seconds to watch for other processes


class OtherLoad:
    """Counter of the cores that other processes take from our threads.

    Only the CPUs in the process's affinity mask count, and not the work on those that we leave idle: with 1
    thread on 2 cores, another process may use one.
    """

    def __init__(self) -> None:
        self._last = self._read()

    def lap(self) -> float | None:
        """Return the mean number of cores taken from us since the last lap; None where the system does not
        report it."""
        before, self._last = self._last, self._read()
        if before is None or self._last is None:
            return None
        wall, busy, own = (after - earlier for after, earlier in zip(self._last, before))
        if wall <= 0:
            return None
        spare = len(_usable_cpus()) - torch.get_num_threads()
        return max(0.0, (busy - own) / wall - spare)

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Return the clock, the CPU time of all processes on our CPUs and that of this process and its ended
        children, in seconds; None if the system does not report them."""
        names, ticks = {f"cpu{number}" for number in _usable_cpus()}, None
        try:
            for name, *fields in map(str.split, STAT.read_text().splitlines()):
                if name in names:
                    user, nice, system, _, _, irq, softirq, steal = (*map(int, fields), *[0] * 8)[:8]
                    ticks = (ticks or 0) + user + nice + system + irq + softirq + steal
        except (OSError, ValueError):
            return None
        if ticks is None:  # a container whose CPUs have other numbers here
            return None
        busy = ticks / os.sysconf("SC_CLK_TCK")
        children = os.times()
        own = time.process_time() + children.children_user + children.children_system
        return time.monotonic(), busy, own


def check_quiet(refuse: bool, seconds: float | None = None) -> str | None:
    """Watch for `seconds` whether other processes would spoil timings.

    Args:
        refuse: raise if they would, instead of returning a warning.
        seconds: LOOK if None.

    Returns:
        a warning in one line, or None.

    Raises:
        UserError: `refuse`, and the machine is busy.
    """
    load = OtherLoad()
    time.sleep(LOOK if seconds is None else seconds)
    taken = load.lap()
    if taken is None or taken <= BUSY:
        return None
    problem = f"other processes take {taken:.1f} of the {torch.get_num_threads()} cores that are to be timed"
    if refuse:
        raise UserError(f"busy: {problem}; end them, or set OMP_NUM_THREADS lower and repeat")
    return problem


def _usable_cpus() -> set[int]:
    """Return the logical CPUs in the process's affinity mask."""
    if not hasattr(os, "sched_getaffinity"):  # macOS, Windows
        return set(range(os.cpu_count() or 1))
    return os.sched_getaffinity(0)
