"""How many cores there are for a team of threads, beside what other processes take.

The threads of a native call wait for each other some hundred times. Where another process has one of the
cores, all of them wait for the thread that shares it, and fewer threads are faster: on 2 cores beside one
busy process one thread decodes as fast as without it, and two take about twice the time. So a team that
does not get its cores is made smaller, and its full size is tried again from time to time.
"""

import ctypes
import time
from collections.abc import Callable

from drafttrain.kernels.build import library

WINDOW = 0.05  # seconds of a team's work after which it is judged
LOST = 0.3  # cores up to which a team stays: a thread fewer costs as much
LOST_SHARE = 0.05  # of a large team's
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 2.0  # seconds until the full size is tried again


def team_times() -> tuple[float, float]:
    """Return the seconds so far that threads worked in native calls by several, and those of them in which
    they had a core."""
    found = (ctypes.c_int64 * 2)()
    library().team_times(found)
    return 1e-9 * found[0], 1e-9 * found[1]


class Cores:
    """Judges teams by the share of their time in which they had a core each.

    Args:
        times: as `team_times`.
        clock: seconds.
    """

    def __init__(self, times: Callable = team_times, clock: Callable[[], float] = time.monotonic):
        self.times, self.clock = times, clock
        self.limit: int | None = None  # threads; None: all that are asked for
        self.pause, self.again = FIRST_PAUSE, 0.0
        self.size, self.seen = 1, None  # of teams since the window began, and the times at which it did

    def fit(self, threads: int) -> int:
        """Return how many of `threads` the next call should have."""
        if threads == 1:
            return 1
        now = self.times()
        if self.seen is None or now < self.seen:  # a fork counts from 0
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
        """Take note of the cores that a window's teams lacked."""
        if lost > max(LOST, LOST_SHARE * self.size):
            if self.limit is None:
                self.again, self.pause = self.clock() + self.pause, min(2 * self.pause, LONGEST_PAUSE)
            self.limit = max(1, int(self.size - lost + LOST))
        elif self.limit is None:
            self.pause = FIRST_PAUSE
