"""Every file that a command reads, damaged in every way."""

from collections.abc import Callable
from pathlib import Path

from tests.hostile.cases import cases
from tests.hostile.runner import Outcome, run


def measure(place: Path, every: int, note: Callable[[Outcome], None]) -> None:
    """Run all cases, or one of `every` of each file's, one after the other."""
    world = place / "world"
    for number, case in enumerate(cases(world, every)):
        note(run(case, world, place / str(number)))
