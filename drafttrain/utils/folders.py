"""Folders that results are written to, and folders that appear whole or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drafttrain.utils.errors import UserError
from drafttrain.utils.writing import clear_leftovers, own_name


def make_out(path: str | os.PathLike) -> None:
    """Make the folder `out` of a run, if there is none, before hours are spent on what it is for.

    Raises:
        UserError: it cannot be made or written to.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(
            f"out: must be a folder, got {path}, which is a file or in one; name another"
        ) from None
    except OSError as error:
        raise UserError(
            f"out: must be a folder that can be made, got {path} ({error.strerror}); name another"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"out: must be a folder that can be written to, got {path}; name another")


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
