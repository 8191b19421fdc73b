"""Reuse finished stage folders of other runs, and set aside what is outdated or damaged."""

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
from drafttrain.utils.provenance import RECORD, content_hashes, read_record
from drafttrain.utils.writing import write_json


def find_twin(
    output: Path,
    folder: str,
    is_same: Callable[[dict[str, Any]], bool],
    damaged: Callable[[Path, dict[str, Any]], Sequence[str]],
) -> Path | None:
    """Return an undamaged folder of this name in a sibling run of `output`, whose record is `is_same`."""
    for path in sorted(output.parent.glob(f"*/{folder}/{RECORD}")):
        with contextlib.suppress(UserError):
            record = read_record(path.parent) if path.parent.parent != output else None
            if record and is_same(record) and not damaged(path.parent, record):
                return path.parent
    return None


def share_folder(twin: Path, folder: Path, links: bool) -> float:
    """Copy a finished folder; return the seconds. Kept hidden states are linked or left out: they are large.

    Args:
        links: hard-link where the disk has them; not for stages that append to files of a finished folder.

    Raises:
        UserError: the folder changes meanwhile, because its own run makes it again.
    """
    begun, record = time.monotonic(), read_record(twin)
    changed = UserError(f"{twin}: must not change while it is copied, got changes; repeat the command")
    with new_folder(folder) as copy:
        how = {"copy_function": _link if links else shutil.copy2, "ignore": shutil.ignore_patterns(".states")}
        try:
            shutil.copytree(twin, copy, dirs_exist_ok=True, **how)
        except (FileNotFoundError, shutil.Error) as error:
            if read_record(twin) == record and all(os.path.exists(source) for source, *_ in _failed(error)):
                raise  # such as a full disk
            raise changed from None
        if record is None or read_record(twin) != record:  # which goes first if it is made again
            raise changed
        with contextlib.suppress(OSError):  # there are none, or the disk has no links
            shutil.copytree(twin / ".states", copy / ".states", copy_function=os.link)
        (copy / RECORD).unlink()
        spent = round(time.monotonic() - begun, 3)
        write_json(copy / RECORD, {**record, "wall_seconds": spent, "shared": str(twin)})
    return spent


def holds_others(folder: Path, hashes: Callable[[Path], str]) -> bool:
    """Return whether a finished folder has files that its stage did not write, or that were changed since."""
    record = read_record(folder)
    if record is None or "files" not in record:  # unfinished, or of an earlier version
        return False
    return any(record["files"].get(name) != one for name, one in content_hashes(folder, hashes).items())


def keep(folder: Path, place: Path) -> Path:
    """Move a folder to a free name below `place`, and return its new path."""
    free = _free(folder, place)
    os.replace(folder, free)
    return free


def _free(folder: Path, place: Path) -> Path:
    place.mkdir(exist_ok=True)
    kept = (place / f"{folder.name}-{number}" for number in itertools.count(1))
    return next(path for path in kept if not path.exists())


def seconds_killed(folder: Path, marker: Path) -> float:
    """Return the seconds that a killed attempt worked on a folder, up to the last file that it wrote.

    Args:
        marker: file that was last written at the start of the attempt, or at its orderly end.
    """
    files = [path for path in folder.rglob("*") if path.is_file()]
    last = max((path.stat().st_mtime for path in files), default=0.0)
    return max(0.0, last - marker.stat().st_mtime)


def set_aside(folder: Path, names: Sequence[str], place: Path, marker: Path) -> Iterator[tuple[str, Path]]:
    """Move some files of a finished folder to a free name below `place`, then mark the folder as unfinished.
    The files are not deleted, because somebody may have changed them on purpose. A kill in between leaves a
    finished folder that lacks files, never an unfinished one with damaged files.

    Args:
        marker: gets the note of the unfinished folder.

    Yields:
        name and new place of each that exists.
    """
    record, free = read_record(folder), _free(folder, place)
    for name in names:
        if (folder / name).exists():
            (free / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(folder / name, free / name)
            yield name, free / name
    write_json(marker, {name: record[name] for name in ("made_from", "wall_seconds")})
    (folder / RECORD).unlink()


def _failed(error: OSError) -> list[tuple[str, str, str]]:
    """Return source, target and reason of each file that `copytree` could not copy."""
    return error.args[0] if isinstance(error, shutil.Error) else [(error.filename, "", "")]


def _link(source: str, target: str) -> None:
    """Hard-link a file, or copy it on a disk without hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
