"""Files that are either whole or absent."""

import glob
import json
import os
import platform
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from drafttrain.utils.errors import UserError

HOST = re.sub(r"\W", "", platform.node())[:16]  # process numbers are only known on their own machine


@contextmanager
def whole_file(path: str | os.PathLike) -> Iterator[IO[bytes]]:
    """Open a temporary file for writing that becomes `path` when the block ends without an error, so that a
    reader never sees half a file. Leftovers of killed processes are removed."""
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise UserError(f"{path}: must be a file, got a device or a pipe; name a file")
    path = Path(os.path.realpath(path) if os.path.islink(path) else os.path.abspath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(path)
    temporary = path.with_name(f"{own_name(path)}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | os.PathLike, text: str) -> None:
    """Write a text as a whole file."""
    with whole_file(path) as file:
        file.write(text.encode())


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Write JSON as a whole file."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def own_name(path: Path) -> str:
    """Return the name of a hidden file for this process only, next to `path` and without a suffix."""
    return f".{path.name}.{HOST}-{os.getpid()}-{uuid.uuid4().hex[:8]}"


def clear_leftovers(path: Path) -> None:
    """Remove temporary files and folders that ended processes of this machine have left for `path`. A folder
    that was lost between the two renames is put back."""
    for ending in ("old", "tmp"):
        for leftover in path.parent.glob(f".{glob.escape(path.name)}.{HOST}-*-*.{ending}"):
            number = leftover.name.split("-")[-2]
            if not number.isdecimal() or _lives(int(number)):
                continue
            if ending == "old" and not path.exists():
                os.replace(leftover, path)
            elif leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


def _lives(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True
