"""How many cores there are for a team of threads, beside what other processes take.

The threads of a native call wait for each other some hundred times. Where another process has one of the
cores, all of them wait for the thread that shares it, and fewer threads are faster: on 2 cores beside one
busy process a token takes two threads 15 ms and one thread 10, as long as without it. So a team that does
not get its cores is made smaller, and its full size is tried again from time to time.
"""

import ctypes
import time
from collections.abc import Callable

from drafttrain.kernels.build import library

WINDOW = 0.02  # seconds of a team's work after which it is judged
LOST = 0.3  # cores; one thread fewer costs about as much
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0  # seconds until the full size is tried again

Times = Callable[[], tuple[float, float]]


def team_times() -> tuple[float, float]:
    """Return the seconds so far that threads of native calls wanted a core, and those that they had one."""
    found = (ctypes.c_double * 2)()
    library().team_times(found)
    return found[0], found[1]


class Cores:
    """Judges teams by the share of their time that they had a core each.

    Args:
        times: as `team_times`.
        clock: seconds.
    """

    def __init__(self, times: Times = team_times, clock: Callable[[], float] = time.monotonic):
        self.times, self.clock = times, clock
        self.limit: int | None = None  # threads; None: all that are asked for
        self.pause, self.again = FIRST_PAUSE, 0.0
        self.seen = 0.0, 0.0

    def fit(self, threads: int) -> int:
        """Return how many of `threads` the next call should have.

        The time since the last call of this is that of teams of as many as were returned then.
        """
        if threads == 1:
            return 1
        wanted, got = (now - before for now, before in zip(self.times(), self.seen))
        size = min(threads, self.limit or threads)
        if wanted > WINDOW * size:
            self.seen = self.times()
            self._judge(size, size * got / wanted)
        if self.limit is not None and self.clock() >= self.again:
            self.limit, self.seen = None, self.times()
        return min(threads, self.limit or threads)

    def _judge(self, size: int, cores: float) -> None:
        if cores > size - LOST:
            if self.limit is None:
                self.pause = FIRST_PAUSE
            return
        self.limit, self.again = max(1, int(cores + LOST)), self.clock() + self.pause
        self.pause = min(2 * self.pause, LONGEST_PAUSE)
