"""Files and folders that are either whole or absent, and fingerprints of their contents."""

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drafttrain.utils.errors import UserError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
BAD_PLACE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO}
BAD_PLACE |= {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG}


def disk_problem(error: BaseException, place: str | os.PathLike = "disk") -> str | None:
    """Describe an error of a full disk or an unusable path in one line; return None for other errors.

    Args:
        place: where was being written, named when the error itself does not say it (`write` never does).
    """
    if isinstance(error, OSError) and error.errno in BAD_PLACE and error.filename:
        return f"{error.filename}: {error.strerror}; choose another place, or resolve that"
    cause: BaseException | None = error
    while cause is not None:  # safetensors and torch have error types of their own
        if getattr(cause, "errno", None) in DISK_FULL or "No space left on device" in str(cause):
            return f"{getattr(cause, 'filename', None) or place}: no space left; free some and repeat"
        cause = cause.__cause__ or cause.__context__
    return None


def cache_dir() -> Path:
    """Folder for fetched targets: `$DRAFTTRAIN_CACHE`, by default `~/.cache/drafttrain`."""
    return Path(os.environ.get("DRAFTTRAIN_CACHE") or Path.home() / ".cache" / "drafttrain")


def sha256_file(path: str | os.PathLike) -> str:
    """Hex sha256 of a file's bytes."""
    with open(path, "rb") as file:
        return (
            hashlib.file_digest(file, "sha256").hexdigest()
            if hasattr(hashlib, "file_digest")
            else _sha256(file)
        )


def _sha256(file) -> str:  # Python 3.10 has no file_digest
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def fingerprint(value: Any) -> str:
    """First 16 hex digits of the sha256 of a value's canonical JSON; dataclasses and paths are allowed."""

    def plain(item: Any) -> Any:
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            return dataclasses.asdict(item)
        if isinstance(item, os.PathLike):
            return os.fspath(item)
        raise TypeError(f"cannot fingerprint a {type(item).__name__}")

    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=plain)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_json(path: str | os.PathLike, value: Any) -> None:
    """Writes JSON under a temporary name and renames it, so that a reader never sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=2, ensure_ascii=False)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: str | os.PathLike) -> Any:
    """Reads a JSON file.

    Raises:
        UserError: the file is missing, unreadable or not JSON.
    """
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{path}: cannot be read as JSON ({error}); delete it and make it again") from None


@contextmanager
def usable(place: str | os.PathLike, remedy: str) -> Iterator[None]:
    """Turn the errors of reading a damaged file into one line.

    Raises:
        UserError: the block raised such an error.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise UserError(f"{place}: damaged ({error}); {remedy}") from None


def require_free_disk(path: str | os.PathLike, n_bytes: int, what: str) -> None:
    """Refuses to start writing `n_bytes` where the disk has less room.

    Raises:
        UserError: not enough free disk under `path`.
    """
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < n_bytes:
        raise UserError(
            f"{path}: {what} needs {n_bytes / 1e9:.2f} GB and the disk has {free / 1e9:.2f} GB free; "
            "free some space or choose another folder"
        )
