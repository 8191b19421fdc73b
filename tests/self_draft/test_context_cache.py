"""The context cache against a search through everything that was put in."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.self_draft.context_cache import ACCEPTED, BRANCH, PROMPT, ContextCache

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=12), max_size=4)


def search(texts: list[list[int]], suffix: list[int], longest: int) -> tuple[int, list[int]]:
    """Tokens after the longest end that occurs with something after it, the newest first, each once."""
    for length in range(min(longest, len(suffix)), 0, -1):
        end, found = suffix[-length:], []
        for text in texts:
            found += [text[i] for i in range(length, len(text)) if text[i - length : i] == end]
        if found:
            return length, list(dict.fromkeys(reversed(found)))
    return 0, []


@given(TEXTS, st.lists(st.integers(0, 3), min_size=1, max_size=6), st.integers(1, 4))
def test_against_a_search(texts, suffix, longest):
    cache = ContextCache(longest)
    for text in texts:
        cache.add(text, ACCEPTED)
    matched, tokens = cache.after(suffix)
    assert (matched, [token for token, _ in tokens]) == search(texts, suffix, longest)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=20), st.data())
def test_text_in_pieces_is_text_at_once(text, data):
    whole, pieces = ContextCache(3), ContextCache(3)
    whole.add(text, ACCEPTED)
    done = 0
    while done < len(text):
        more = data.draw(st.integers(1, len(text) - done))
        known = min(done, 3)
        pieces.add(text[done - known : done + more], ACCEPTED, known)
        done += more
    assert pieces._entries == whole._entries


def test_the_newest_source_is_returned():
    cache = ContextCache(3)
    cache.add([1, 2, 3], PROMPT)
    cache.add([2, 3], BRANCH)
    cache.add([9, 2, 4], ACCEPTED)
    assert cache.after([1, 2]) == (2, [(3, PROMPT)])
    assert cache.after([8, 2]) == (1, [(4, ACCEPTED), (3, BRANCH)])
    assert cache.after([7]) == (0, []) == cache.after([])


def test_followers_and_prefixes_are_bounded():
    cache = ContextCache(longest=1, followers=2, prefixes=3)
    for token in (5, 6, 7):
        cache.add([1, token], ACCEPTED)
    assert cache.after([1]) == (1, [(7, ACCEPTED), (6, ACCEPTED)])
    for token in (2, 3):
        cache.add([token, 0], ACCEPTED)
    cache.add([1, 8], ACCEPTED)  # used again, so it is not the oldest
    cache.add([4, 0], ACCEPTED)
    assert len(cache) == 3 and cache.after([2]) == (0, [])
    assert [token for token, _ in cache.after([1])[1]] == [8, 7]


@pytest.mark.parametrize("longest", [1, 4])
def test_one_token_is_no_n_gram(longest):
    cache = ContextCache(longest)
    cache.add([1], PROMPT)
    assert len(cache) == 0
