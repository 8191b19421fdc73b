"""Timeline of a scheduled run: who was busy when, as in Figures 1, 3 and 4 of the SEED paper."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

TARGET, DRAFTER = "target", "drafter"
NEWEST = 200_000  # spans that are kept: a run may last for hours


@dataclass(frozen=True)
class Span:
    """A span of time in which one party worked on some sequences.

    Attributes:
        who: "target", "drafter" or the name of a drafting worker.
        what: "prefill" (the target or the drafter reads prompts), "verify" or "draft". A forward of the
            target over prompts and drafts has two spans.
        sequences: numbers of the sequences.
        begin, end: seconds since the timeline began.
    """

    who: str
    what: str
    sequences: tuple[int, ...]
    begin: float
    end: float


@dataclass
class Timeline:
    """The newest spans, in the order in which they ended.

    Attributes:
        clock: returns the time in seconds.
    """

    clock: Callable[[], float] = time.perf_counter
    spans: deque[Span] = field(default_factory=lambda: deque(maxlen=NEWEST))

    def __post_init__(self) -> None:
        self.started = self.clock()

    @contextmanager
    def span(self, who: str, what: str, sequences: Sequence[int]) -> Iterator[None]:
        """Record the enclosed work as a span."""
        begin = self.clock() - self.started
        try:
            yield
        finally:
            self.spans.append(Span(who, what, tuple(sequences), begin, self.clock() - self.started))

    def busy(self, who: str = TARGET, begin: float | None = None, end: float | None = None) -> float:
        """Return the fraction of the time between `begin` and `end` in which `who` was busy.

        Args:
            begin, end: seconds since the timeline began; None: its start, or the oldest span's if older ones
                were dropped, and the last span's end.
        """
        if begin is None:
            begin = self.spans[0].begin if len(self.spans) == NEWEST else 0.0
        end = max((span.end for span in self.spans), default=0.0) if end is None else end
        own = sorted((span.begin, span.end) for span in self.spans if span.who == who)
        total, until = 0.0, begin
        for first, last in own:  # spans of one forward overlap
            total += max(0.0, min(last, end) - max(first, until))
            until = max(until, last)
        return total / (end - begin) if end > begin else 0.0
