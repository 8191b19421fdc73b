"""Reading of JSON files, the cache folder, and fingerprints of values."""

import dataclasses
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drafttrain.utils.errors import UserError


def cache_dir() -> Path:
    """Return the cache folder: `$DRAFTTRAIN_CACHE`, by default `~/.cache/drafttrain`."""
    return Path(os.environ.get("DRAFTTRAIN_CACHE") or Path.home() / ".cache" / "drafttrain")


def fingerprint(value: Any) -> str:
    """Return 16 hex digits of the sha256 of a value's canonical JSON; dataclasses and paths are allowed."""

    def plain(item: Any) -> Any:
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            return dataclasses.asdict(item)
        if isinstance(item, os.PathLike):
            return os.fspath(item)
        raise TypeError(f"cannot fingerprint a {type(item).__name__}")

    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=plain)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]  # file names may need it


def require_file(path: str | os.PathLike) -> None:
    """Refuse pipes and devices, which may never end, except those that a shell opens (`<(command)`).

    Raises:
        UserError: the path is one, or has a NUL character in it.
    """
    if "\0" in os.fspath(path):
        raise UserError(f"{os.fspath(path)!r}: must be a path, got a NUL character in it; correct it")
    kind = os.stat(path).st_mode if os.path.exists(path) else stat.S_IFREG
    is_open = os.path.abspath(path).startswith(("/dev/fd/", "/dev/stdin", "/proc/"))
    if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind) or is_open):
        raise UserError(f"{path}: must be a file, got a pipe or device; write its content to a file")


def read_json(path: str | os.PathLike) -> Any:
    """Read a JSON file.

    Raises:
        UserError: the file is missing, unreadable or not JSON.
    """
    require_file(path)
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:  # ValueError: no UTF-8, no JSON, too many digits
        raise UserError(f"{path}: cannot be read as JSON ({error}); delete it and make it again") from None


@contextmanager
def usable(place: str | os.PathLike, remedy: str) -> Iterator[None]:
    """Turn errors that a damaged file causes inside the block into a `UserError` of one line.

    Raises:
        UserError: the block raised such an error.
    """
    try:
        yield
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{place}: damaged ({error}); {remedy}") from None
