"""Let the other processes of a run wait for files that the first one writes."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from drafttrain.utils.errors import UserError

WAITS = 6000  # tries, a tenth of a second apart
T = TypeVar("T")


def wait_for(file: Path, found: Callable[[], T | None]) -> T:
    """Wait until `found` returns a value; None and UserError mean that the file is missing or half written.

    Raises:
        UserError: the first process does not write it within ten minutes.
    """
    for _ in range(WAITS):
        with contextlib.suppress(UserError):
            if (value := found()) is not None:
                return value
        time.sleep(0.1)
    raise UserError(f"{file}: the first process did not write it within ten minutes; see its messages")


def wait_for_file(file: Path) -> None:
    """Wait until a file is there.

    Raises:
        UserError: as `wait_for`.
    """
    wait_for(file, lambda: file.exists() or None)
