"""Manifests of written folders: a command only replaces files that are unchanged since it wrote them."""

from collections.abc import Collection
from pathlib import Path, PurePosixPath

from drafttrain.utils.files import read_json
from drafttrain.utils.hashes import sha256_file
from drafttrain.utils.writing import write_json

MANIFEST = ".files.json"  # a folder's files by name with their sha256


def write_manifest(folder: Path) -> None:
    """Record the files of a folder with their hashes, for `is_ours`."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    hashes = {path.relative_to(folder).as_posix(): sha256_file(path) for path in files}
    write_json(folder / MANIFEST, hashes)


def is_ours(folder: Path, names: Collection[str] = ()) -> bool:
    """Return whether a folder may be replaced: the files of its manifest that it holds are unchanged, and
    there are no links and no other files or folders.

    Args:
        names: names of other files that it may hold.
    """
    written = read_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
    if folder.is_symlink() or not isinstance(written, dict):
        return False
    inner = {str(parent) for name in (*written, *names) for parent in PurePosixPath(name).parents}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink() or not (path.is_file() or (path.is_dir() and name in inner)):
            return False
        if path.is_dir():
            continue
        if name in written:
            if sha256_file(path) != written[name]:
                return False
        elif name != MANIFEST and name not in names:
            return False
    return True
