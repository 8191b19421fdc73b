"""One process at a time writes a file or a folder."""

import getpass
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from drafttrain.utils.errors import UserError
from drafttrain.utils.files import cache_dir
from drafttrain.utils.provenance import HASHES, LOCK

LEVELS = 3  # of folders below a run's


@contextmanager
def locked(place: str | os.PathLike) -> Iterator[None]:
    """Keep other processes of this machine from writing a file or folder, and the run that it is part of, if
    it is of one. A lock ends with its process.

    Raises:
        UserError: another process has it.
    """
    real = os.path.realpath(place)
    name = hashlib.sha256(real.encode(errors="surrogateescape")).hexdigest()[:32]
    around = list(Path(real).parents)[:LEVELS]
    runs = [folder / LOCK for folder in around if (folder / LOCK).is_file() and (folder / HASHES).is_file()]
    with ExitStack() as stack:
        for lock in [_folder() / f"{name}.lock", *runs]:
            try:
                # singletons: a command that locks two places in a run has that run's lock twice
                stack.enter_context(FileLock(lock, is_singleton=lock in runs).acquire(timeout=0))
            except Timeout:
                raise UserError(
                    f"{place}: must be written by one process at a time, got a second; wait for the first or "
                    "end it"
                ) from None
        yield


def _folder() -> Path:
    """Return the folder of the locks: in the cache, or where that is read-only in the temporary folder."""
    user = getattr(os, "getuid", getpass.getuser)  # a container's may have no name
    places = cache_dir(), Path(tempfile.gettempdir()) / f"drafttrain-{user()}"
    for place in places:
        with suppress(OSError):
            (place / "locks").mkdir(parents=True, exist_ok=True)
            if os.access(place / "locks", os.W_OK):
                return place / "locks"
    raise UserError(
        f"{places[0]}: must be writable, got a read-only folder; set DRAFTTRAIN_CACHE to another one"
    )
