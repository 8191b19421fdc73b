"""Targets known by name, and the record in the folder of a fetched target."""

import os
from pathlib import Path
from typing import Any

from drafttrain.utils.files import read_json

SMOLLM2 = "smollm2-135m-instruct"
RECORD = "target.json"


def is_known(name: str) -> bool:
    """Return whether `fetch_target` knows the model by this name, and it is no folder spelled like it."""
    is_here = (Path(name) / "config.json").is_file()
    return name == SMOLLM2 or name.lower() == SMOLLM2 and not is_here


def read_record(folder: str | os.PathLike) -> dict[str, Any] | None:
    """Return `target.json` of a fetched folder (name, source, sha256, sizes, versions); None without one, or
    if it is another program's file of that name.

    Raises:
        UserError: it is not JSON.
    """
    path = Path(folder) / RECORD
    record = read_json(path) if path.is_file() else None
    return record if isinstance(record, dict) else None
