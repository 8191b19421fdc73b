"""The cases that one of several processes runs."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """One case of `every`, dealt out to `lanes` processes of which this is number `lane`."""

    every: int = 1
    lane: int = 0
    lanes: int = 1

    def of(self, cases: Iterable[T]) -> list[T]:
        """Return this process's share of all cases."""
        return self.dealt(list(cases)[:: self.every])

    def dealt(self, cases: Iterable[T]) -> list[T]:
        """Return this process's share of cases of which one of `every` is taken already."""
        return list(cases)[self.lane :: self.lanes]
