"""The corpus cache of Self-Draft: n-grams of a large text with their counts.

A folder with `ngrams.json` (header) and `ngrams.bin` (arrays, little-endian, memory-mapped). The n-grams are
a trie in levels: an entry of level n is an n-gram, and its extensions by one token are adjacent in level
n + 1, sorted by that token. Level 1 holds every token of the vocabulary, by id; the others only n-grams that
occur `min_count` times, so the prefix of each is there. Arrays, each padded to 8 bytes, in this order:

    for n = 1 … gram      token     last token, uint16 or (vocabularies above 65,535) uint32; not in level 1
                          count     occurrences in the text
                          children  one more than there are entries: those of entry i are the entries
                                    children[i] … children[i + 1] - 1 of level n + 1; not in the last level
    for n = 1 … gram - 1  heavy     entries with more than `top` children, ascending
                          ranked    the `top` most frequent children of each, as entries of level n + 1

all but `token` as uint32. The children of other entries are few enough to be sorted when looked up. An
n-gram takes 10 bytes, 6 in the last level and 2 more where the vocabulary is large; `heavy` and `ranked` add
little.

This module knows nothing of text or tokenizers beyond their hash.
"""

import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json
from drafttrain.utils.hashes import sha256_file

FILE = "ngrams.json"
DATA = "ngrams.bin"
FORMAT_VERSION = 1
_ALIGNMENT = 8  # bytes
_REMEDY = "build it again with drafttrain build-ngrams, or copy it again"


@dataclass(frozen=True)
class Matches:
    """Followers of a suffix in the corpus.

    Attributes:
        tokens: most frequent first, the smaller id first among equal counts.
        counts: occurrences of the suffix followed by each token.
        matched: length of the suffix that was found; 0 if none was.
        total: occurrences of that suffix with any follower, so that counts / total are probabilities.
    """

    tokens: list[int]
    counts: list[int]
    matched: int
    total: int


NO_MATCHES = Matches([], [], 0, 0)


@dataclass(frozen=True)
class Shape:
    """The sizes of a cache, which determine the place of each array in the file.

    Attributes:
        vocabulary: tokens have ids below it.
        top: candidates that are ranked for an entry with many children.
        sizes: entries of levels 1 … gram.
        heavy: entries of levels 1 … gram - 1 with more than `top` children.
    """

    vocabulary: int
    top: int
    sizes: tuple[int, ...]
    heavy: tuple[int, ...]

    @property
    def token_dtype(self) -> np.dtype:
        """Return the type of token ids; `vocabulary` itself fits too."""
        return token_dtype(self.vocabulary)

    def arrays(self) -> list[tuple[str, int, np.dtype, int]]:
        """Return (name, level, dtype, length) of every array, in the order of the file."""
        index, gram = np.dtype("<u4"), len(self.sizes)
        found = []
        for level, size in enumerate(self.sizes, 1):
            found += [("token", level, self.token_dtype, size)] if level > 1 else []
            found += [("count", level, index, size)]
            found += [("children", level, index, size + 1)] if level < gram else []
        for level, size in enumerate(self.heavy, 1):
            found += [("heavy", level, index, size), ("ranked", level, index, size * self.top)]
        return found

    @property
    def n_bytes(self) -> int:
        """Return the length of the file in bytes."""
        return sum(padded(dtype.itemsize * length) for _, _, dtype, length in self.arrays())


class CorpusCache:
    """Read-only corpus cache, memory-mapped by `open`.

    Attributes:
        path: its folder.
        header: content of `ngrams.json`.
        shape: sizes of the arrays.
        gram: tokens of the longest n-gram.
        max_prefix: gram - 1, the longest suffix that is looked up.
        arrays: (name, level) → memory-mapped array, as the module's docstring lists them.
    """

    def __init__(self, path: Path, header: dict[str, Any], shape: Shape, data: np.ndarray):
        self.path, self.header, self.shape = path, header, shape
        self.gram = len(shape.sizes)
        self.max_prefix = self.gram - 1
        self.arrays: dict[tuple[str, int], np.ndarray] = {}
        at = 0
        for name, level, dtype, length in shape.arrays():
            end = at + dtype.itemsize * length
            self.arrays[name, level] = data[at:end].view(dtype)
            at += padded(end - at)
        # Reading single numbers is several times faster from a memoryview than from a numpy array. Lists by
        # level, with None where there is no array.
        views = {key: memoryview(array) for key, array in self.arrays.items()}
        self._tokens, self._counts, self._children, self._heavy, self._ranked = (
            [views.get((name, level)) for level in range(self.gram + 1)]
            for name in ("token", "count", "children", "heavy", "ranked")
        )

    def __deepcopy__(self, memo: dict) -> "CorpusCache":
        """Return the cache itself: it is read-only, so copied sequences share it."""
        return self

    @classmethod
    def open(cls, path: str | os.PathLike, tokenizer_hash: str | None = None) -> "CorpusCache":
        """Open a cache without reading its arrays.

        Args:
            path: folder that `build_ngrams` wrote.
            tokenizer_hash: of the tokenizer whose ids will be looked up (`data.chat.tokenizer_hash`); None
                leaves out the check.

        Raises:
            UserError: no cache, one of another format, tokenizer or size.
        """
        path = Path(path)
        if not (path / FILE).is_file():
            raise UserError(
                f"{path}: no n-gram cache here ({FILE} is missing); build one with drafttrain build-ngrams"
            )
        header = read_json(path / FILE)
        if not isinstance(header, dict) or header.get("format_version") != FORMAT_VERSION:
            raise UserError(f"{path / FILE}: no n-gram cache of format {FORMAT_VERSION}; {_REMEDY}")
        shape = _shape(path / FILE, header)
        if tokenizer_hash is not None and header["tokenizer_hash"] != tokenizer_hash:
            raise UserError(
                f"{path}: made with another tokenizer ({header['tokenizer_hash']}, here {tokenizer_hash}); "
                "build a cache for this one with drafttrain build-ngrams"
            )
        try:
            size = (path / DATA).stat().st_size
            if size != shape.n_bytes:
                raise UserError(
                    f"{path / DATA}: {size} bytes where {FILE} says {shape.n_bytes}: cut off, or of another "
                    f"cache; {_REMEDY}"
                )
            data = np.asarray(np.memmap(path / DATA, dtype=np.uint8, mode="r"))
        except OSError as error:
            raise UserError(f"{path / DATA}: cannot be read ({error.strerror}); {_REMEDY}") from None
        return cls(path, header, shape, data)

    def verify(self) -> None:
        """Check the whole file against its checksum, which `open` does not.

        Raises:
            UserError: the arrays are not those that were written.
        """
        if sha256_file(self.path / DATA) != self.header.get("sha256"):
            raise UserError(f"{self.path / DATA}: damaged (its checksum differs); {_REMEDY}")

    def next_tokens(self, suffix: Sequence[int], limit: int, longest: int | None = None) -> Matches:
        """Return the most frequent tokens after the longest suffix of a text that the corpus holds.

        Args:
            suffix: the text so far, or its last `max_prefix` tokens; ids beyond the vocabulary match nothing.
            limit: how many tokens at most; there are never more than the `top` the cache was built with.
            longest: length of the longest suffix to look up; `matched - 1` of the last call gives the next
                shorter one.

        Raises:
            UserError: an offset or a count is invalid, because the file is damaged.
        """
        longest = self.max_prefix if longest is None else min(longest, self.max_prefix)
        if longest < 1 or limit < 1:
            return NO_MATCHES
        known = list(suffix[-longest:])
        try:
            while known:
                node = self._find(known)
                if node is not None:
                    level = len(known)
                    tokens, counts = self._best(level, node, limit)
                    total = self._counts[level][node]
                    if not tokens or max(tokens) >= self.shape.vocabulary:
                        raise IndexError
                    if not 0 < min(counts) <= max(counts) <= total:
                        raise IndexError
                    return Matches(tokens, counts, level, total)
                del known[0]
            return NO_MATCHES
        except IndexError:
            raise UserError(
                f"{self.path / DATA}: damaged (an offset or a count is none); {_REMEDY}"
            ) from None

    def _find(self, prefix: list[int]) -> int | None:
        """Return the entry of an n-gram, if it is there and has children."""
        node = prefix[0]
        if not 0 <= node < self.shape.vocabulary:
            return None
        for level in range(1, len(prefix)):
            children, tokens, token = self._children[level], self._tokens[level + 1], prefix[level]
            end = children[node + 1]
            node = bisect_left(tokens, token, children[node], end)
            if node >= end or tokens[node] != token:
                return None
        children = self._children[len(prefix)]
        return node if children[node] < children[node + 1] else None

    def _best(self, level: int, node: int, limit: int) -> tuple[list[int], list[int]]:
        """Return tokens and counts of an entry's most frequent children."""
        tokens, counts, top = self._tokens[level + 1], self._counts[level + 1], self.shape.top
        start, end = self._children[level][node], self._children[level][node + 1]
        if end - start > top:
            at = top * bisect_left(self._heavy[level], node)
            best = self._ranked[level][at : at + min(limit, top)].tolist()
            return [tokens[i] for i in best], [counts[i] for i in best]
        found, times = tokens[start:end].tolist(), counts[start:end].tolist()
        if len(found) > 1:  # children are in the order of their ids, which a stable sort keeps among equals
            best = sorted(range(len(found)), key=times.__getitem__, reverse=True)[:limit]
            return [found[i] for i in best], [times[i] for i in best]
        return found[:limit], times[:limit]

    def most_frequent(self, length: int, number: int) -> list[tuple[list[int], int]]:
        """Return the most frequent n-grams of a length with their counts, for the report."""
        counts = self.arrays["count", length]
        number = min(number, len(counts))
        if number < 1:
            return []
        least = np.partition(counts, len(counts) - number)[-number]
        entries = np.flatnonzero(counts >= max(least, 1))
        entries = entries[np.argsort(-counts[entries].astype(np.int64), kind="stable")][:number]
        return [(self._tokens_of(length, int(entry)), int(counts[entry])) for entry in entries]

    def _tokens_of(self, level: int, entry: int) -> list[int]:
        """Return the tokens of an n-gram."""
        tokens: list[int] = []
        for above in range(level, 1, -1):
            tokens.insert(0, int(self.arrays["token", above][entry]))
            entry = int(np.searchsorted(self.arrays["children", above - 1], entry, side="right")) - 1
        return [entry, *tokens]


def token_dtype(vocabulary: int) -> np.dtype:
    """Return the smallest type for ids up to and including `vocabulary`."""
    return np.dtype("<u2") if vocabulary < 1 << 16 else np.dtype("<u4")


def padded(n_bytes: int) -> int:
    """Return the bytes that an array takes in the file, padding included."""
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT


def _shape(path: Path, header: dict[str, Any]) -> Shape:
    """Return the sizes in a header.

    Raises:
        UserError: they are missing or impossible.
    """
    try:
        sizes, heavy = tuple(header["entries"]), tuple(header["heavy"])
        shape = Shape(header["vocabulary"], header["top"], sizes, heavy)
        numbers = [shape.vocabulary, shape.top, *sizes, *heavy]
        is_whole = (
            isinstance(header["tokenizer_hash"], str)
            and isinstance(header["sha256"], str)
            and all(type(number) is int and 0 <= number < 1 << 32 for number in numbers)
            and len(sizes) == header["gram"] == len(heavy) + 1 >= 2
            and sizes[0] == shape.vocabulary
            and shape.top >= 1
        )
    except (KeyError, TypeError):
        is_whole = False
    if not is_whole:
        raise UserError(f"{path}: damaged (sizes are missing or impossible); {_REMEDY}")
    return shape
