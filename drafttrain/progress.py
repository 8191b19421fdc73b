"""Progress of work that is counted: a bar on a terminal, elsewhere (nohup, a job's log) a line a minute."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress

LOG_EVERY_S = 60.0


@contextmanager
def counted(
    title: str, total: int, unit: str = "steps", console: Console | None = None
) -> Iterator[Callable[..., None]]:
    """Shows how much of a piece of work is done; yields what advances it, by one unless told otherwise.

    Args:
        title: what is going on.
        total: how much there is to do.
        unit: what is counted, for the lines.
        console: None: standard output.
    """
    console = console or Console()
    begun = logged = time.monotonic()
    done = 0
    with Progress(transient=True, console=console, disable=not console.is_terminal) as bars:
        bar = bars.add_task(title, total=total)

        def advance(n: int = 1) -> None:
            nonlocal done, logged
            done += n
            bars.advance(bar, n)
            now = time.monotonic()
            if done and not console.is_terminal and now - logged >= LOG_EVERY_S:
                logged = now
                minutes = (total - done) * (now - begun) / done / 60
                console.print(
                    f"{title}: {done:,} of {total:,} {unit}, about {minutes:.0f} min left",
                    highlight=False,
                    markup=False,
                    soft_wrap=True,
                )

        yield advance
