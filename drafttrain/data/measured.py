"""Record of the evaluation prompts that a corpus has been compared with; its drafter must not learn them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from drafttrain.data.config import PromptSet
from drafttrain.utils.files import fingerprint, read_json
from drafttrain.utils.provenance import content_hashes
from drafttrain.utils.writing import write_json

FILE = ".measured.json"  # in the folder of the corpus; hidden, as later stages do not depend on it


def not_compared(corpus: str | Path, measured: Sequence[PromptSet]) -> list[PromptSet]:
    """Return the prompt sets that a corpus has not been compared with, or whose files have changed since."""
    known = _known(corpus)
    return [one for one in measured if known.get(_key(one)) != hash_input(one.path)]


def note_compared(corpus: str | Path, measured: Sequence[PromptSet]) -> None:
    """Record that a corpus has been compared with these prompts and holds none of them."""
    if measured:
        new = {_key(one): hash_input(one.path) for one in measured}
        write_json(Path(corpus) / FILE, _known(corpus) | new)


def hash_input(path: str | Path) -> str:
    """Return the sha256 of a file in hex, or a hash of a folder's files without hidden ones.

    Raises:
        UserError: a file cannot be read.
    """
    hashes = content_hashes(path)
    return hashes.get("") or fingerprint([[name, digest] for name, digest in hashes.items()])


def note_changed(made: str, new: Sequence[PromptSet], inputs: Iterable[tuple[str, str]]) -> bool:
    """Return whether an input has changed or is gone since `made` was made of it, so that its texts cannot be
    compared with prompts; print a line if so.

    Args:
        made: "corpus" or "ngrams".
        new: the prompts.
        inputs: path of each input, and its hash as it was then, or the hash's first digits.
    """
    for path, known in inputs:
        if not Path(path).exists() or not hash_input(path).startswith(known):
            paths = ", ".join(one.path for one in new)
            line = f"{made}: {paths} cannot be compared with it, as {path} has changed or is gone since"
            Console(stderr=True).print(line, style="yellow", markup=False, soft_wrap=True)
            return True
    return False


def _known(corpus: str | Path) -> dict[str, Any]:
    file = Path(corpus) / FILE
    return read_json(file) if file.exists() else {}


def _key(one: PromptSet) -> str:
    return f"{one.path}, limit {one.limit}, turns {one.turns}"
