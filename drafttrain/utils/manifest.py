"""Which files of a folder are ours: what a command replaces must be as it has written it."""

from collections.abc import Collection
from pathlib import Path

from drafttrain.utils.files import read_json, write_json
from drafttrain.utils.hashes import sha256_file

MANIFEST = ".files.json"  # a folder's files by name with their sha256


def write_manifest(folder: Path) -> None:
    """Record the files of a folder with their hashes, for `is_ours`."""
    hashes = {path.name: sha256_file(path) for path in sorted(folder.iterdir()) if path.is_file()}
    write_json(folder / MANIFEST, hashes)


def is_ours(folder: Path, names: Collection[str] | None = None) -> bool:
    """Return whether a folder may be replaced: it holds files alone, no folder and no link, with the contents
    that its manifest records.

    Args:
        names: of files that it may have besides those of the manifest; None: any.
    """
    written = read_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
    if folder.is_symlink() or not isinstance(written, dict):
        return False
    for path in folder.iterdir():
        if path.is_symlink() or not path.is_file():
            return False
        if path.name in written:
            if sha256_file(path) != written[path.name]:
                return False
        elif path.name != MANIFEST and names is not None and path.name not in names:
            return False
    return True
