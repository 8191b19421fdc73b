"""Folders that appear whole or not at all."""

import glob
import os
import platform
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HOST = re.sub(r"\W", "", platform.node())[:16]  # process numbers are only known on their own machine


@contextmanager
def new_folder(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary folder beside `path` that becomes `path` when the block ends well.

    An existing `path` is replaced only then; after an exception the temporary folder is removed. What a
    killed process has left of its own is removed, or put back where the kill came between the two renames. A
    link to a folder stays one.
    """
    path = Path(path).resolve() if os.path.islink(path) else Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _clear_leftovers(path)
    own = f".{path.name}.{HOST}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    temporary, replaced = path.with_name(f"{own}.tmp"), path.with_name(f"{own}.old")
    temporary.mkdir()
    try:
        yield temporary
        if path.exists():
            os.replace(path, replaced)
        os.replace(temporary, path)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _clear_leftovers(path: Path) -> None:
    """Remove the temporary folders of processes of this machine that are no more."""
    for ending in ("old", "tmp"):
        for leftover in path.parent.glob(f".{glob.escape(path.name)}.{HOST}-*-*.{ending}"):
            number = leftover.name.split("-")[-2]
            if number.isdecimal() and not _lives(int(number)):
                if ending == "old" and not path.exists():
                    os.replace(leftover, path)
                else:
                    shutil.rmtree(leftover, ignore_errors=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True
