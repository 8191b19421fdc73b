"""Locks that let one process at a time write a file or a folder."""

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

LEVELS = 3  # of folders up from a file at which its run's folder is looked for


@contextmanager
def locked(place: str | os.PathLike) -> Iterator[None]:
    """Lock a file or folder, and the run that it belongs to, if any, against other processes of this machine.
    A lock ends with its process.

    Raises:
        UserError: another process holds a lock.
    """
    real = os.path.realpath(place)
    name = hashlib.sha256(real.encode(errors="surrogateescape")).hexdigest()[:32]
    around = list(Path(real).parents)[:LEVELS]
    runs = [folder / LOCK for folder in around if (folder / LOCK).is_file() and (folder / HASHES).is_file()]
    with ExitStack() as stack:
        for lock in [lock_folder() / f"{name}.lock", *runs]:
            try:
                # singletons: a command that locks two places in a run takes that run's lock twice
                stack.enter_context(FileLock(lock, is_singleton=lock in runs).acquire(timeout=0))
            except Timeout:
                raise UserError(
                    f"{place}: must be written by one process at a time, got a second; wait for the first or "
                    "end it"
                ) from None
        yield


def lock_folder() -> Path:
    """Return the folder of the locks: in the cache, or in the temporary folder if the cache is read-only."""
    user = getattr(os, "getuid", getpass.getuser)  # in a container a user may have no name
    places = cache_dir(), Path(tempfile.gettempdir()) / f"drafttrain-{user()}"
    for place in places:
        with suppress(OSError):
            (place / "locks").mkdir(parents=True, exist_ok=True)
            if os.access(place / "locks", os.W_OK):
                return place / "locks"
    raise UserError(
        f"{places[0]}: must be writable, got a read-only folder; set DRAFTTRAIN_CACHE to another one"
    )
