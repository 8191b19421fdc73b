"""Size of a team of threads, limited to the cores that other processes leave free.

The threads of a native call wait for each other some hundred times. Where another process has one of the
cores, all of them wait for the thread that shares it, and fewer threads are faster: on 2 cores, one of them
busy, one thread decodes as fast as on idle cores, and two take about twice the time. So a team that does
not get its cores is made smaller, and its full size is tried again from time to time.
"""

import ctypes
import time
from collections.abc import Callable

from drafttrain.kernels.build import library

WINDOW = 0.05  # seconds of a team's work after which it is judged
LOST = 0.3  # cores that a team may lack and keep its size: one thread less costs as much
LOST_SHARE = 0.05  # the same for large teams, as a share of their size
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 2.0  # seconds until the full size is tried again


def team_times() -> tuple[float, float]:
    """Return the seconds that threads have spent in native calls of several threads, summed over them, and
    those of them in which they were running on a core."""
    found = (ctypes.c_int64 * 2)()
    library().team_times(found)
    return 1e-9 * found[0], 1e-9 * found[1]


class Cores:
    """Limit of a team's size, set by the share of its time in which each thread had a core.

    Args:
        times: returns the same as `team_times`.
        clock: returns the time in seconds.
    """

    def __init__(self, times: Callable = team_times, clock: Callable[[], float] = time.monotonic):
        self.times, self.clock = times, clock
        self.limit: int | None = None  # threads; None: all that are asked for
        self.pause, self.again = FIRST_PAUSE, 0.0
        self.size, self.seen = 1, None  # size of the window's teams, and `times()` at its start

    def fit(self, threads: int) -> int:
        """Return how many of `threads` the next call should have."""
        if threads == 1:
            return 1
        now = self.times()
        if self.seen is None or now < self.seen:  # a forked process counts from 0
            self.seen = now
        worked, had = now[0] - self.seen[0], now[1] - self.seen[1]
        if worked > WINDOW * self.size:
            self.seen = now
            self._judge(self.size * (1 - had / worked))
        if self.limit is not None and self.clock() >= self.again:
            self.limit, self.seen = None, now
        self.size = min(threads, self.limit or threads)
        return self.size

    def _judge(self, lost: float) -> None:
        """Adapt the limit to the number of cores that the teams of a window lacked."""
        if lost > max(LOST, LOST_SHARE * self.size):
            if self.limit is None:
                self.again, self.pause = self.clock() + self.pause, min(2 * self.pause, LONGEST_PAUSE)
            self.limit = max(1, int(self.size - lost + LOST))
        elif self.limit is None:
            self.pause = FIRST_PAUSE
