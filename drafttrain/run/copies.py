"""Copies of stages' folders: of another run's, and of what was outdated or damaged."""

import contextlib
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from drafttrain.utils.errors import UserError
from drafttrain.utils.folders import new_folder
from drafttrain.utils.provenance import RECORD, read_record
from drafttrain.utils.writing import write_json


def find_twin(
    output: Path,
    folder: str,
    is_same: Callable[[dict[str, Any]], bool],
    damaged: Callable[[Path, dict[str, Any]], Sequence[str]],
) -> Path | None:
    """Return a whole folder of this name in another run beside `output` whose record `is_same`."""
    for path in sorted(output.parent.glob(f"*/{folder}/{RECORD}")):
        with contextlib.suppress(UserError):
            record = read_record(path.parent) if path.parent.parent != output else None
            if record and is_same(record) and not damaged(path.parent, record):
                return path.parent
    return None


def share_folder(twin: Path, folder: Path, links: bool) -> float:
    """Copy a finished folder; return the seconds. Kept hidden states stay where they are: they are large.

    Args:
        links: by hard links where the disk has them; not for stages that go on in a finished folder's files.
    """
    begun, record = time.monotonic(), read_record(twin)
    with new_folder(folder) as copy:
        how = {"copy_function": _link if links else shutil.copy2, "ignore": shutil.ignore_patterns(".states")}
        shutil.copytree(twin, copy, dirs_exist_ok=True, **how)
        (copy / RECORD).unlink()
        spent = round(time.monotonic() - begun, 3)
        write_json(copy / RECORD, {**record, "wall_seconds": spent, "shared": str(twin)})
    return spent


def keep(folder: Path, place: Path) -> Path:
    """Move a folder to a free name below `place`, and return that."""
    free = _free(folder, place)
    os.replace(folder, free)
    return free


def _free(folder: Path, place: Path) -> Path:
    place.mkdir(exist_ok=True)
    kept = (place / f"{folder.name}-{number}" for number in itertools.count(1))
    return next(path for path in kept if not path.exists())


def set_aside(folder: Path, names: Sequence[str], place: Path) -> Iterator[tuple[str, Path]]:
    """Move files of a folder to a free name below `place`, as somebody may have changed them on purpose.

    Yields:
        name and new place of each that exists.
    """
    free = _free(folder, place)
    for name in names:
        if (folder / name).exists():
            (free / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / name, free / name)
            yield name, free / name


def _link(source: str, target: str) -> None:
    """A hard link, or a copy on a disk that has none."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
