"""Every file that a command reads, damaged in every way, and hostile values of options, keys and trees."""

from collections.abc import Callable
from pathlib import Path

from studies.hostile.share import Share
from tests.hostile.every_case import every_case
from tests.hostile.runner import Outcome, run


def measure(place: Path, share: Share, note: Callable[[Outcome], None]) -> None:
    """Run all cases, or one of some of each file's, one after the other."""
    world = place / "world"
    for number, case in enumerate(share.dealt(every_case(world, share.every))):
        note(run(case, world, place / str(number)))
