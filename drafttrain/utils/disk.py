"""Full disks and unusable paths, reported in one line."""

import errno
import os
import shutil
from pathlib import Path

from drafttrain.utils.errors import UserError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
BAD_PLACE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO}
BAD_PLACE |= {errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG}
# messages of torch and numpy for a failed write, which do not give the reason
UNWRITTEN = ("PytorchStreamWriter", "unexpected pos", "iostream error", "requested and", "Input/output error")


def disk_problem(error: BaseException, place: str | os.PathLike = "disk") -> str | None:
    """Describe an error of a full disk or an unusable path in one line; return None for other errors.

    Args:
        place: path that was being written, named if the error does not name one (that of `write` never does).
    """
    if isinstance(error, OSError) and error.errno in BAD_PLACE and error.filename:
        where = error.filename2 or error.filename  # of a rename the new name: the old one is a temporary file
        return f"{where}: {error.strerror}; choose another place, or resolve that"
    chain: list[BaseException] = [error]  # safetensors and torch have error types of their own
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    for one in chain:
        if getattr(one, "errno", None) in DISK_FULL or "No space left on device" in str(one):
            return f"{getattr(one, 'filename', None) or place}: no space left; free some and repeat"
    if any(words in str(one) for one in chain for words in UNWRITTEN):
        return f"{place}: cannot be written; look for a full or failing disk, and repeat"
    return None


def require_free_disk(path: str | os.PathLike, n_bytes: int, what: str) -> None:
    """Require `n_bytes` of free disk space under `path`, before anything is written.

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
