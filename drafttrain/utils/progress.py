"""Progress of work that is counted: a bar on a terminal, elsewhere (nohup, a job's log) a line a minute."""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TextColumn

LOG_EVERY_S = 60.0
SAMPLE_EVERY_S = 1.0
EXACT_BELOW_S = 270.0  # whole minutes would be more than a tenth wrong


@contextmanager
def counted(
    title: str, total: int, unit: str = "steps", console: Console | None = None, done: int = 0
) -> Iterator[Callable[..., None]]:
    """Show how much of some work is done and the time left; yield a function that advances the count.

    It is called as `advance(n=1, work=None, note="")`. If steps take unequal time or are counted late, `work`
    gives (done, total) of this attempt in a unit that takes the same time from start to end, and the time
    left is estimated from it. `note` is shown after the count.

    Args:
        title: name of the work.
        total: number of units in all.
        unit: name of the unit, for the lines of a log.
        console: where to print; None: standard output.
        done: units that an earlier attempt has done.
    """
    console = console or Console()
    begun = logged = time.monotonic()
    rate, earlier = _Rate(begun), done
    columns = [
        TextColumn(title, markup=False),
        BarColumn(),
        TaskProgressColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    ]
    with Progress(*columns, transient=True, console=console, disable=not console.is_terminal) as bars:
        bar = bars.add_task("", total=total, completed=done, note="")

        def advance(n: int = 1, work: tuple[float, float] | None = None, note: str = "") -> None:
            nonlocal done, logged
            done += n
            now = time.monotonic()
            left = rate.seconds_left(now, *(work or (done - earlier, total - earlier)))
            about = "" if left is None else f"about {_duration(left)} left"
            note = ", ".join(filter(None, (note, about)))
            bars.update(bar, advance=n, note=note)
            if left is not None and not console.is_terminal and now - logged >= LOG_EVERY_S:
                logged = now
                line = f"{title}: {done:,} of {total:,} {unit}, {note}"
                console.print(line, highlight=False, markup=False, soft_wrap=True)

        yield advance


class _Rate:
    """Speed of some work over the second half of the elapsed time, and never before its first step was done:
    the start, which loads, encodes prompts and fills caches, is not typical of the rest."""

    def __init__(self, begun: float):
        self.times, self.done = [begun], [0.0]

    def seconds_left(self, now: float, done: float, total: float) -> float | None:
        """Estimate the seconds that the rest takes; None while nothing is done."""
        if done <= 0:
            return None
        since = max(bisect_right(self.times, (self.times[0] + now) / 2) - 1, min(1, len(self.times) - 1))
        if done <= self.done[since]:  # nothing since then
            since = 0
        seconds, units = now - self.times[since], done - self.done[since]
        if len(self.times) == 1 or now - self.times[-1] >= SAMPLE_EVERY_S:
            self.times.append(now)
            self.done.append(done)
        return max(total - done, 0.0) * seconds / units


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < EXACT_BELOW_S else f"{seconds / 60:.0f} min"
