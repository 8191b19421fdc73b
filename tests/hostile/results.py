"""The results of a command, to compare two runs of it."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# what a clock or the load of the machine decides, such as warnings of noise, and what only resuming needs
TIMED = re.compile(
    r"second|elapsed|runtime|wall|finished|per_s|_ms|load|speed|time|cost|spent|shared|contention|^(output|files|flags)$"
)
IGNORED = ("checkpoints", "checkpoint-", "previous", ".")
PICTURES = (".png", ".html", ".md", ".svg")  # drawn from the rest, with times in them

Values = dict[str, Any]


def read(folder: Path) -> Values:
    """Return all values in a folder's files: leaves of JSON by their place, hashes of other files."""
    found: Values = {}
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.is_file() and not any(part.startswith(IGNORED) for part in parts):
            found.update(values("/".join(parts), path, str(folder)))
    return found


def values(name: str, path: Path, place: str) -> Iterator[tuple[str, Any]]:
    """Yield the values of a file; absolute paths below `place` are without it."""
    if path.suffix in PICTURES:
        yield name, path.stat().st_size > 0
    elif path.suffix in (".json", ".jsonl"):
        text = path.read_text(encoding="utf-8").replace(place, "")
        rows = [json.loads(text)] if path.suffix == ".json" else [json.loads(x) for x in text.splitlines()]
        yield name, len(rows)
        for i, row in enumerate(rows):
            yield from leaves(row, f"{name}:{i}")
    else:
        yield name, hashlib.sha256(path.read_bytes()).hexdigest()


def leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a JSON value by their place."""
    inner = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    )
    if inner is None:
        yield place, value
        return
    for key, part in inner:
        if not TIMED.search(str(key)):
            yield from leaves(part, f"{place}.{key}")


def stable(runs: Sequence[Values]) -> Values:
    """Return what is equal in all of several undisturbed runs; that something is there counts where its value
    is not equal."""
    first = runs[0]
    common = [place for place in first if all(place in run for run in runs)]
    return {
        place: first[place] if all(run[place] == first[place] for run in runs) else None for place in common
    }


def difference(expected: Values, found: Values) -> str | None:
    """Return the first place in which a run differs from what is stable; None: it does not."""
    for place, value in expected.items():
        if place not in found:
            return f"{place} is missing"
        if value is not None and found[place] != value:
            return f"{place}: {value!r} expected, got {found[place]!r}"
    return None
