"""Folders that appear whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drafttrain.utils.writing import clear_leftovers, own_name


@contextmanager
def new_folder(path: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary folder next to `path` that becomes `path` when the block ends without an error.

    An existing `path` is replaced only then; after an exception the temporary folder is removed. Leftovers of
    killed processes are removed; a folder that was lost between the two renames is put back. A link to a
    folder stays a link.
    """
    path = Path(os.path.realpath(path) if os.path.islink(path) else os.path.abspath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(path)
    own = own_name(path)
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
