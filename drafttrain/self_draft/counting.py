"""Count n-grams level by level, in parts that fit into memory.

A part is a range of pairs (first token, second token). The cache is sorted by these, so parts can be counted
in any order and by any number of processes, and their results are concatenated.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from drafttrain.self_draft.corpus_cache import token_dtype

BLOCK = 1 << 22  # tokens or entries that are read together
BYTES_PER_POSITION = 64  # memory per occurrence in a part while its n-grams are sorted


@dataclass(frozen=True)
class TokenFile:
    """Token ids of a whole corpus on disk, stretches of text separated by the id `vocabulary`.

    Attributes:
        path: the file, as `token_dtype(vocabulary)`.
        vocabulary: tokens have ids below it.
    """

    path: Path
    vocabulary: int

    def open(self, mode: str = "r") -> np.ndarray:
        """Return the ids [T], memory-mapped."""
        return np.memmap(self.path, dtype=token_dtype(self.vocabulary), mode=mode)


@dataclass(frozen=True)
class Part:
    """A range of pairs, as `first * (vocabulary + 1) + second`, and the folder of its counts."""

    begin: int
    end: int
    folder: Path

    def file(self, name: str, level: int) -> Path:
        """Return the file of an array: `token`, `count` or `children` (their number, not their offset)."""
        return self.folder / f"{name}-{level}"


@dataclass(frozen=True)
class Counted:
    """Number of n-grams of 2 … gram tokens in a part: those with a frequent prefix, and those kept."""

    distinct: list[int]
    kept: list[int]


def token_counts(file: TokenFile) -> np.ndarray:
    """Return the occurrences of each token, int64 [V]."""
    tokens = file.open()
    counts = np.zeros(file.vocabulary + 1, np.int64)
    for at in range(0, len(tokens), BLOCK):
        counts += np.bincount(tokens[at : at + BLOCK], minlength=file.vocabulary + 1)
    return counts[:-1]


def plan_parts(file: TokenFile, counts: np.ndarray, min_count: int, most: int, folder: Path) -> list[Part]:
    """Cut the pairs into ranges of at most `most` occurrences each.

    A single pair is never cut: one that is more frequent than `most` fills a part alone.

    Args:
        counts: from `token_counts`.
    """
    edges, size = [0], 0
    for key, times in _cuttable(file, counts, min_count, most):
        if size and size + times > most:
            edges.append(key)
            size = 0
        size += times
    edges.append(file.vocabulary * (file.vocabulary + 1))
    return [
        Part(begin, end, folder / f"part-{number:05d}")
        for number, (begin, end) in enumerate(zip(edges, edges[1:]))
    ]


def _cuttable(file: TokenFile, counts: np.ndarray, min_count: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield each pair at which a part may begin, and the occurrences up to the next one."""
    width = file.vocabulary + 1
    for first in np.flatnonzero(counts >= min_count).tolist():
        if counts[first] <= most:
            yield first * width, int(counts[first])
            continue
        tokens = file.open()
        seconds = np.zeros(width, np.int64)
        for at in range(0, len(tokens) - 1, BLOCK):
            here = np.flatnonzero(tokens[at : min(at + BLOCK, len(tokens) - 1)] == first) + at
            seconds += np.bincount(tokens[here + 1], minlength=width)
        for second in np.flatnonzero(seconds).tolist():
            yield first * width + second, int(seconds[second])


def count_part(file: TokenFile, part: Part, counts: np.ndarray, gram: int, min_count: int) -> Counted:
    """Count the n-grams of a part and write them into its folder.

    An n-gram's key is (number of its prefix among those kept, last token), so n-grams with a rare prefix are
    not counted, and each level is in the order of the level above.

    Args:
        counts: from `token_counts`.
    """
    part.folder.mkdir(parents=True)
    tokens, width = file.open(), file.vocabulary + 1
    positions = _positions(tokens, part, counts >= min_count, width)  # uint32 [P], of first tokens
    prefixes = tokens[positions].astype(np.uint64)  # [P]
    n_prefixes = file.vocabulary
    distinct, kept = [], []
    for length in range(2, gram + 1):
        last = tokens[positions.astype(np.int64) + (length - 1)]  # [P]
        inside = last != file.vocabulary
        if not inside.all():
            positions, prefixes, last = positions[inside], prefixes[inside], last[inside]
        keys = prefixes * np.uint64(width) + last
        order = np.argsort(keys)
        keys = keys[order]
        starts = np.flatnonzero(np.concatenate([[True], keys[1:] != keys[:-1]])[: len(keys)])
        times = np.diff(np.append(starts, len(keys)))
        frequent = times >= min_count
        entries = keys[starts[frequent]]
        del keys
        parents = (entries // np.uint64(width)).astype(np.int64)
        np.bincount(parents, minlength=n_prefixes).astype("<u4").tofile(part.file("children", length - 1))
        (entries % np.uint64(width)).astype(tokens.dtype).tofile(part.file("token", length))
        times[frequent].astype("<u4").tofile(part.file("count", length))
        distinct.append(len(starts))
        kept.append(n_prefixes := len(entries))
        positions = positions[order[np.repeat(frequent, times)]]
        prefixes = np.repeat(np.arange(n_prefixes, dtype=np.uint64), times[frequent])
    return Counted(distinct, kept)


def _positions(tokens: np.ndarray, part: Part, is_frequent: np.ndarray, width: int) -> np.ndarray:
    """Return the positions of a part's pairs, uint32 [P]."""
    lowest, highest = part.begin // width, (part.end - 1) // width
    known = np.append(is_frequent, False)  # the separator is no token
    found = [np.empty(0, np.uint32)]
    for at in range(0, len(tokens) - 1, BLOCK):
        first = tokens[at : min(at + BLOCK, len(tokens) - 1)]
        here = np.flatnonzero((first >= lowest) & (first <= highest))
        here = here[known[first[here]]]
        pairs = first[here].astype(np.int64) * width + tokens[here + (at + 1)]
        here = here[(pairs >= part.begin) & (pairs < part.end)]
        found.append((here + at).astype(np.uint32))
    return np.concatenate(found)
