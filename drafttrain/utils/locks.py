"""One process at a time writes a file or a folder."""

import getpass
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from drafttrain.utils.errors import UserError
from drafttrain.utils.files import cache_dir


@contextmanager
def locked(place: str | os.PathLike) -> Iterator[None]:
    """Keep other processes of this machine from writing a file or folder. A lock ends with its process.

    Raises:
        UserError: another process has it.
    """
    name = hashlib.sha256(os.path.realpath(place).encode(errors="surrogateescape")).hexdigest()[:32]
    try:
        lock = FileLock(_folder() / f"{name}.lock").acquire(timeout=0)
    except Timeout:
        raise UserError(
            f"{place}: must be written by one process at a time, got a second; wait for the first or end it"
        ) from None
    with lock:
        yield


def _folder() -> Path:
    """Return the folder of the locks: in the cache, or where that is read-only in the temporary folder."""
    places = cache_dir(), Path(tempfile.gettempdir()) / f"drafttrain-{getpass.getuser()}"
    for place in places:
        with suppress(OSError):
            (place / "locks").mkdir(parents=True, exist_ok=True)
            if os.access(place / "locks", os.W_OK):
                return place / "locks"
    raise UserError(
        f"{places[0]}: must be writable, got a read-only folder; set DRAFTTRAIN_CACHE to another one"
    )
