"""Hashes of files."""

import hashlib
import os


def sha256_file(path: str | os.PathLike) -> str:
    """Return the sha256 of a file's bytes in hex."""
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
