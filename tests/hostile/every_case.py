"""All hostile cases of `runner.py`."""

from collections.abc import Iterator
from pathlib import Path

from tests.hostile.cases import COMMANDS, FULL, WITH_BUNDLE, cases
from tests.hostile.options import options
from tests.hostile.runner import Case
from tests.hostile.sizes import sizes, trees
from tests.hostile.writers import WRITERS

OPTIONS = 3  # one value of this many: together they would take half of the time


def every_case(world: Path, share: int = 1) -> Iterator[Case]:
    """Yield all cases, or one of `share` of each file's and kind's."""
    yield from cases(world, share)
    own = {name: words for name, words in WRITERS.items() if words[0] != "run"}
    yield from list(options({**COMMANDS, **own}))[:: share * OPTIONS]
    yield from list(sizes(FULL))[::share]
    yield from list(trees((*WITH_BUNDLE, "--calibration", "{world}/calibration")))[::share]
