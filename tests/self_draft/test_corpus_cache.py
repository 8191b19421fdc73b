"""The cache against a brute-force counter, and what becomes of files that are damaged or of another kind."""

import json
import os
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from drafttrain.self_draft.build import write_cache
from drafttrain.self_draft.config import NgramConfig
from drafttrain.self_draft.corpus_cache import DATA, FILE, CorpusCache, Matches, token_dtype
from drafttrain.self_draft.counting import TokenFile
from drafttrain.utils.errors import UserError


def build(folder: Path, texts, vocabulary=10, gram=4, min_count=2, top=3, **settings) -> CorpusCache:
    """A cache of texts that are given as token ids."""
    work = folder / "work"
    work.mkdir(parents=True)
    ids = [token for text in texts for token in (*text, vocabulary)]
    np.array(ids, token_dtype(vocabulary)).tofile(work / "tokens")
    config = NgramConfig(gram=gram, min_count=min_count, top=top, processes=1, **settings)
    file = TokenFile(work / "tokens", vocabulary)
    return write_cache(config, file, folder, {"tokenizer_hash": "abc"}, Console(quiet=True))[0]


class BruteForce:
    """Every n-gram of the texts, counted one by one."""

    def __init__(self, texts, gram, min_count, top):
        self.gram, self.min_count, self.top = gram, min_count, top
        self.counts = Counter(
            tuple(text[at : at + length])
            for text in texts
            for length in range(1, gram + 1)
            for at in range(len(text) - length + 1)
        )

    def next_tokens(self, suffix, limit, longest):
        for length in range(min(longest, self.gram - 1, len(suffix)), 0, -1):
            prefix = tuple(suffix[-length:])
            found = sorted(
                (-count, ngram[-1])
                for ngram, count in self.counts.items()
                if ngram[:-1] == prefix and count >= self.min_count
            )[: min(limit, self.top)]
            if found:
                tokens, counts = [token for _, token in found], [-count for count, _ in found]
                return Matches(tokens, counts, length, self.counts[prefix])
        return Matches([], [], 0, 0)


tokens = st.integers(0, 4)
texts = st.lists(st.lists(tokens, max_size=40), min_size=1, max_size=6)


@settings(max_examples=150)
@given(
    texts=texts,
    suffixes=st.lists(st.lists(tokens, max_size=6), max_size=20),
    spread=st.sampled_from([1, 20_000]),  # ids up to 80,000 need 32 bits
    gram=st.integers(2, 5),
    min_count=st.integers(1, 3),
    top=st.integers(1, 4),
    limit=st.integers(1, 6),
    longest=st.integers(0, 5),
    memory=st.sampled_from([1.0, 1e-9, 1e-6]),  # all at once, each pair alone, a few together
)
def test_against_brute_force(texts, suffixes, spread, gram, min_count, top, limit, longest, memory):
    texts = [[spread * token for token in text] for text in texts]
    expected = BruteForce(texts, gram, min_count, top)
    frequent = {g: n for g, n in expected.counts.items() if n >= min_count}
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"vocabulary": 4 * spread + 1, "gram": gram, "min_count": min_count, "top": top}
        if not any(len(ngram) == 2 for ngram in frequent):
            with pytest.raises(UserError, match="no two tokens follow each other"):
                build(Path(folder) / "c", texts, memory=memory, **arguments)
            return
        cache = build(Path(folder) / "c", texts, memory=memory, **arguments)
        for length in range(1, gram + 1):
            found = {tuple(ngram): n for ngram, n in cache.most_frequent(length, 10**6) if n >= min_count}
            assert found == {ngram: n for ngram, n in frequent.items() if len(ngram) == length}
        for suffix in [*suffixes, *(text[:at] for text in texts for at in range(len(text)))]:
            suffix = [spread * token for token in suffix] if suffix in suffixes else suffix
            for most in (longest, gram):
                assert cache.next_tokens(suffix, limit, most) == expected.next_tokens(suffix, limit, most)
            assert cache.next_tokens(suffix, limit) == cache.next_tokens(suffix, limit, gram)
        cache.verify()


@pytest.fixture
def cache(tmp_path) -> CorpusCache:
    return build(tmp_path / "cache", [[1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4], [2, 3, 9, 9, 9]])


def test_lookup_goes_back_to_shorter_ends(cache):
    assert cache.gram == 4 and cache.max_prefix == 3
    assert cache.next_tokens([7, 1, 2, 3], 5) == Matches([4], [2], 3, 3)  # 5 followed once only
    assert cache.next_tokens([1, 2, 3], 5, longest=2) == Matches([4], [2], 2, 4)
    assert cache.next_tokens([6, 3], 5) == Matches([4], [2], 1, 4)
    nothing = Matches([], [], 0, 0)
    for suffix in ([], [6], [-1], [10], [10**9]):  # a model may have more ids than its tokenizer
        assert cache.next_tokens(suffix, 5) == nothing
    assert cache.next_tokens([1, 2, 3], 5, longest=0) == nothing
    assert cache.next_tokens((1, 2, 10), 5) == nothing


def test_ngrams_do_not_cross_texts(tmp_path):
    cache = build(tmp_path / "cache", [[1, 2], [3, 1, 2], [3]])
    assert cache.next_tokens([1], 5) == Matches([2], [2], 1, 2)
    assert cache.next_tokens([2], 5) == cache.next_tokens([1, 2], 5) == Matches([], [], 0, 0)


@pytest.mark.parametrize("vocabulary, n_bytes", [(50_000, 12), (150_000, 14)])
def test_size(tmp_path, vocabulary, n_bytes):
    random = np.random.default_rng(0)
    texts = random.zipf(1.3, (300, 500)) % vocabulary
    cache = build(tmp_path / "cache", texts, vocabulary=vocabulary, gram=5, top=16)
    n_ngrams = sum(cache.shape.sizes[1:])
    assert n_ngrams > 20_000 and cache.shape.heavy[0] > 50
    level_1 = 8 * vocabulary  # holds all tokens for any text
    assert ((cache.path / DATA).stat().st_size - level_1) / n_ngrams < n_bytes


# ------------------------------------------------------------------------------------------- damaged files


def refused(folder, match, tokenizer_hash="abc"):
    with pytest.raises(UserError, match=match) as caught:
        CorpusCache.open(folder, tokenizer_hash)
    assert "\n" not in str(caught.value)


def change_header(folder, **changes):
    header = json.loads((folder / FILE).read_text())
    (folder / FILE).write_text(json.dumps({**header, **changes}))


def test_opens_what_is_whole(cache):
    assert CorpusCache.open(cache.path, "abc").next_tokens([1, 2, 3], 1).tokens == [4]
    assert CorpusCache.open(str(cache.path)).header["tokenizer_hash"] == "abc"


def test_no_cache(tmp_path):
    refused(tmp_path, f"{tmp_path}: no n-gram cache here .* build one with drafttrain build-ngrams")
    refused(tmp_path / "nowhere", "no n-gram cache here")


def test_another_tokenizer(cache):
    refused(cache.path, r"made with another tokenizer \(abc, here xyz\); build a cache for this one", "xyz")


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "ngrams.json: cannot be read as JSON"),
        ("[]", "no n-gram cache of format 1"),
        ('{"format_version": 2}', "no n-gram cache of format 1"),
        ('{"format_version": 1}', "sizes are missing or impossible"),
        ("\udcff", "ngrams.json: cannot be read as JSON"),
    ],
)
def test_header_of_another_kind(cache, text, message):
    (cache.path / FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(cache.path, message)


@pytest.mark.parametrize(
    "changes",
    [
        {"vocabulary": "10"},
        {"top": 0},
        {"top": None},
        {"gram": 3},
        {"entries": 7},
        {"entries": [10, -4, 4, 4]},
        {"entries": [10, 4.0, 4, 4]},
        {"entries": [11, 4, 4, 4]},
        {"heavy": [True, 0, 0]},
        {"heavy": []},
        {"tokenizer_hash": None},
    ],
)
def test_impossible_sizes(cache, changes):
    change_header(cache.path, **changes)
    refused(cache.path, "ngrams.json: damaged .sizes are missing or impossible.; build it again")


def test_arrays_that_are_cut_off_or_missing(cache):
    size = (cache.path / DATA).stat().st_size
    os.truncate(cache.path / DATA, size - 1)
    refused(cache.path, f"ngrams.bin: {size - 1} bytes where ngrams.json says {size}: cut off")
    os.truncate(cache.path / DATA, size + 1)
    refused(cache.path, "cut off, or of another cache")
    (cache.path / DATA).unlink()
    refused(cache.path, "ngrams.bin: cannot be read .No such file")


def test_arrays_that_lead_nowhere(cache):
    data = bytearray((cache.path / DATA).read_bytes())
    data[40 + 16 : 40 + 20] = b"\xff" * 4  # where the children of token 3 end
    (cache.path / DATA).write_bytes(data)
    damaged = CorpusCache.open(cache.path)
    for suffix in ([3], [3, 4]):
        with pytest.raises(UserError, match="damaged .an offset or a count is none.; build it again"):
            damaged.next_tokens(suffix, 4)
    with pytest.raises(UserError, match="damaged .its checksum differs.; build it again"):
        damaged.verify()


def test_counts_that_are_none(cache):
    """Such as a hole that a lost power left, without its checksum being looked at."""
    whole = (cache.path / DATA).read_bytes()
    for at in range(0, len(whole), 4):
        (cache.path / DATA).write_bytes(whole[:at] + bytes(4) + whole[at + 4 :])
        damaged = CorpusCache.open(cache.path)
        for suffix in ([1, 2], [3], [3, 4]):
            try:
                found = damaged.next_tokens(suffix, 4)
            except UserError as error:
                assert "damaged (an offset or a count is none)" in str(error)
            else:
                assert all(0 < count <= found.total for count in found.counts)


@settings(max_examples=60)
@given(data=st.data())
def test_any_damage_is_an_error_of_one_line_or_harmless(data):
    with tempfile.TemporaryDirectory() as folder:
        texts = [[1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 4, 1, 6, 1, 7, 1, 6, 1, 7, 1, 8, 1, 8]]
        path = build(Path(folder) / "c", texts, top=2).path
        whole = bytearray((path / DATA).read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
        (path / DATA).write_bytes(whole)
        damaged = CorpusCache.open(path)
        for suffix in ([1], [2], [3], [1, 2], [2, 3], [3, 4, 1], [1, 6], [7, 1]):
            try:
                matches = damaged.next_tokens(suffix, 3)
            except UserError as error:
                assert "\n" not in str(error)
            else:
                assert len(matches.tokens) == len(matches.counts) <= 3
                assert all(0 <= token < 10 for token in matches.tokens)
