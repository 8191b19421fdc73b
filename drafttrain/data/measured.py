"""Record of the evaluation prompts that a corpus has been compared with; its drafter must not learn them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafttrain.data.config import PromptSet
from drafttrain.utils.files import fingerprint, read_json
from drafttrain.utils.hashes import sha256_file
from drafttrain.utils.writing import write_json

FILE = ".measured.json"  # in the folder of the corpus; hidden, as later stages do not depend on it


def not_compared(corpus: str | Path, measured: Sequence[PromptSet]) -> list[PromptSet]:
    """Return the prompt sets that a corpus has not been compared with, or whose files have changed since."""
    known = _known(corpus)
    return [one for one in measured if known.get(_key(one)) != hash_input(one.path)]


def note_compared(corpus: str | Path, measured: Sequence[PromptSet]) -> None:
    """Record that a corpus has been compared with these prompts and holds none of them."""
    if measured:
        write_json(
            Path(corpus) / FILE, _known(corpus) | {_key(one): hash_input(one.path) for one in measured}
        )


def hash_input(path: str | Path) -> str:
    """Return the hash of a file's bytes, or of the names and bytes of the files in a folder."""
    path = Path(path)
    if path.is_file():
        return sha256_file(path)
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return fingerprint([[file.relative_to(path).as_posix(), sha256_file(file)] for file in files])


def _known(corpus: str | Path) -> dict[str, Any]:
    file = Path(corpus) / FILE
    return read_json(file) if file.exists() else {}


def _key(one: PromptSet) -> str:
    return f"{one.path}, limit {one.limit}, turns {one.turns}"
