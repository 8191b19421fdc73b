"""Record what a folder was made with: content hashes of its inputs, versions, the commit of the source."""

import contextlib
import functools
import importlib.metadata
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint, read_json
from drafttrain.utils.hashes import sha256_file
from drafttrain.utils.writing import write_json

RECORD = "stage.json"  # a finished stage's record of its folder
LOCK = ".lock"  # in a run's output folder, while a process works there
HASHES = ".hashes.json"  # there: content hashes by path, size and time of change


class Hashes:
    """Content hashes of files, remembered by path, size and time of change."""

    def __init__(self, path: Path):
        self.path = path
        self.known: dict[str, list] = {}
        self.is_saved = True
        with contextlib.suppress(UserError):  # it is only a cache: without it everything is hashed again
            known = read_json(path)
            self.known = known if isinstance(known, dict) else {}

    def __call__(self, path: Path) -> str:
        """Return the sha256 of a file in hex; it is only read if its size or time of change is new."""
        stat = path.stat()
        name, stamp = str(path.absolute()), [stat.st_size, stat.st_mtime_ns]
        match self.known.get(name):
            case [size, changed, str(known)] if [size, changed] == stamp:
                return known
        self.known[name] = [*stamp, sha256_file(path)]
        self.is_saved = False
        return self.known[name][2]

    def save(self) -> None:
        """Write the hashes to the cache's file, if there are new ones."""
        if not self.is_saved:
            write_json(self.path, self.known)
            self.is_saved = True


def content_hash(path: str | Path, file_hash: Callable[[Path], str] = sha256_file) -> str:
    """Return a hash of a file's bytes, or of a folder's `content_hashes`.

    Raises:
        UserError: a file cannot be read.
    """
    hashes = content_hashes(path, file_hash)
    return hashes[""][:16] if "" in hashes else fingerprint(hashes)


def content_hashes(path: str | Path, file_hash: Callable[[Path], str] = sha256_file) -> dict[str, str]:
    """Return the hashes of the files in a folder by relative name; of a single file, under the name "".

    In folders, `stage.json`, hidden files, files that libraries add while reading (`cache-*.arrow`) and those
    that only resuming needs (`checkpoint-*`) are left out, as they do not change what a later stage sees.

    Raises:
        UserError: a file cannot be read.
    """
    path = name = Path(path)
    hashes = {}
    try:
        if path.is_file():
            return {"": file_hash(path)}
        for name in sorted(path.rglob("*")):
            parts = name.relative_to(path).parts
            ignored = any(part.startswith((".", "checkpoint-")) for part in parts)
            ignored |= name.match("cache-*.arrow")
            if name.is_file() and not ignored and parts != (RECORD,):
                hashes["/".join(parts)] = file_hash(name)
    except OSError as error:
        raise UserError(
            f"{name}: cannot be read ({error.strerror}); resolve that or name another file"
        ) from None
    return hashes


def files_hash(folder: Path, names: Iterable[str]) -> str:
    """Return a hash of some files of a folder, independent of the others.

    Raises:
        UserError: a file cannot be read.
    """
    return fingerprint([content_hash(folder / name) for name in names])


def read_record(folder: Path) -> dict[str, Any] | None:
    """Return the record (`stage.json`) in the folder of a finished stage; None if it is not finished.

    Raises:
        UserError: the file is not the record of a stage.
    """
    path = folder / RECORD
    if not path.exists():
        return None
    match record := read_json(path):
        case {
            "made_from": {"section": dict(), "inputs": dict()},
            "output": str(),
            "figures": dict(),
            "wall_seconds": int() | float(),
        } if isinstance(record.get("files", {}), dict):
            return record
    raise UserError(f"{path}: must be the record of a finished stage; delete its folder and make it again")


@functools.cache
def versions() -> dict[str, str]:
    """Return the installed versions of this package and the libraries that decide what it computes."""
    found = {}
    for name in ("drafttrain", "torch", "transformers", "datasets"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@functools.cache
def git_commit() -> str | None:
    """Return the commit of the source tree that we run from, marked if files differ; None without one."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(Path(__file__).parent), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        # Fails when this is an installed copy inside somebody's own project.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None
