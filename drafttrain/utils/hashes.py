"""Hashes of files."""

import hashlib
import os


def sha256_file(path: str | os.PathLike) -> str:
    """Return the sha256 of a file's bytes in hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
