"""Trees of candidates against slow and obvious ones."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.self_draft.candidates import (
    CORPUS,
    CandidateModel,
    Candidates,
    Drafted,
    Sources,
    grow,
    share_class,
)
from drafttrain.self_draft.context_cache import ACCEPTED, PROMPT, RECYCLED, ContextCache
from drafttrain.self_draft.corpus_cache import Matches

WHY = (("somewhere", 1, 0),)


def followers_of(table: dict[int, dict[int, float]]):
    """Candidates by the last token alone."""
    return lambda text: {token: (share, WHY) for token, share in table.get(text[-1], {}).items()}


@given(
    st.dictionaries(st.integers(0, 4), st.dictionaries(st.integers(0, 4), st.floats(0.05, 0.95), max_size=3)),
    st.integers(0, 12),
    st.floats(0, 0.5),
    st.integers(1, 4),
)
def test_the_tree_holds_the_best_candidates(table, budget, least, max_depth):
    followers = followers_of(table)
    tree = grow([9, 0], followers, budget, least, max_depth, context=3)
    everything = {(): 1.0}  # all paths by brute force
    for depth in range(1, max_depth + 1):
        for path in [path for path in everything if len(path) == depth - 1]:
            for token, (share, _) in followers([0, *path]).items():
                everything[(*path, token)] = everything[path] * share
    wanted = sorted((p for path, p in everything.items() if path and p >= least), reverse=True)[:budget]
    assert tree.joint[1:] == pytest.approx(wanted)
    paths = [path[1:] for path in tree.paths([])]
    assert len(set(paths)) == len(paths) and paths[0] == ()
    for path, joint, depth, parent in zip(paths, tree.joint, tree.depths, tree.parents):
        assert everything[path] == pytest.approx(joint) and depth == len(path)
        assert parent == (-1 if not path else paths.index(path[:-1]))


@pytest.mark.parametrize(
    ("prices", "kept"),
    [
        ([0.0, 0.0, 0.0, 0.0], 3),
        ([0.0, 0.2, 0.7, 1.2], 1),  # the second has 0.45 and costs 0.5
        ([0.0, 0.9, 1.3, 1.4], 3),  # the first three together are worth their price
        ([0.0, 1.0, 2.0, 3.0], 0),
        ([0.0, 0.9, 1.8, 2.7], 0),  # of two sizes that yield the same the smaller
    ],
)
def test_as_many_candidates_as_yield_most_beyond_their_price(prices, kept):
    table = {0: {1: 0.9}, 1: {2: 0.5}, 2: {3: 0.9}}  # 0.9, 0.45, 0.405
    tree = grow([0], followers_of(table), 3, 0.0, 9, 2, prices)
    assert tree.tokens == [0, 1, 2, 3][: kept + 1]


@given(
    st.dictionaries(st.integers(0, 4), st.dictionaries(st.integers(0, 4), st.floats(0.05, 0.95), max_size=3)),
    st.lists(st.floats(0.0, 0.5), min_size=8, max_size=8),
)
def test_growth_ends_only_where_no_larger_tree_could_be_better(table, slopes):
    prices = list(itertools.accumulate(slopes, initial=0.0))
    whole, tree = (grow([0], followers_of(table), 8, 0.0, 4, 3, given) for given in (None, prices))
    gains = [sum(whole.joint[1 : n + 1]) - prices[n] for n in range(len(whole.tokens))]
    assert tree == whole.first(len(tree.tokens))
    assert gains[len(tree.tokens) - 1] == pytest.approx(max(gains))


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=4))
def test_chains_share_what_they_have_in_common(chains):
    tree = Candidates.of(7)
    tree.add(tree.add(0, 1, 0.5, WHY), 2, 0.3, WHY)
    joined, nodes = tree.with_chains(chains, (("chain", 0, 0),))
    paths = [path[1:] for path in joined.paths([])]
    wanted = {(), (1,), (1, 2)} | {tuple(chain[:n]) for chain in chains for n in range(1, len(chain) + 1)}
    assert set(paths) == wanted and len(paths) == len(wanted)
    assert joined.depths == sorted(joined.depths) == [len(path) for path in paths]  # breadth first
    assert all(parent < node for node, parent in enumerate(joined.parents))
    for chain, passed in zip(chains, nodes, strict=True):
        assert [paths[node] for node in passed] == [tuple(chain[: n + 1]) for n in range(len(chain))]
    assert tree.tokens == [7, 1, 2]  # the old one is as it was


@given(
    st.dictionaries(st.integers(0, 4), st.dictionaries(st.integers(0, 4), st.floats(0.05, 0.95), max_size=3)),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.floats(0.05, 0.95)), max_size=6),
    st.integers(0, 12),
    st.floats(0, 0.5),
    st.integers(1, 4),
)
def test_candidates_follow_the_nodes_of_a_drafted_tree(table, nodes, budget, least, max_depth):
    drafted, own, shares = Drafted(Candidates.of(0), [1.0]), (("drafter", 0, 0),), {}
    for parent, token, share in nodes:
        if parent < len(drafted.shares) and (parent, token) not in drafted.tree.index():
            drafted.tree.add(parent, token, drafted.tree.joint[parent] * share, own)
            drafted.shares.append(share)
            shares[drafted.tree.paths([])[-1][1:]] = share
    followers, everything, both = followers_of(table), {(): 1.0}, set()
    for depth in range(1, 8):  # all paths by brute force
        for path in [path for path in everything if len(path) == depth - 1]:
            may = everything[path] >= least and len(path) < max_depth
            offers = {(*path, t): p for t, (p, _) in followers([0, *path]).items()} if may else {}
            both |= offers.keys() & shares.keys()
            children = offers | {one: p for one, p in shares.items() if one[:-1] == path and one}
            for child, share in children.items():
                everything[child] = everything[path] * max(share, offers.get(child, 0.0))
    joint = {path: p for path, p in everything.items() if path and path not in shares and p >= least}
    wanted = sorted(joint.values(), reverse=True)[:budget]
    tree = grow([9, 0], followers, budget, least, max_depth, 3, None, drafted)
    paths = [path[1:] for path in tree.paths([])]
    assert set(paths[: len(shares) + 1]) == {(), *shares} and len(set(paths)) == len(paths)
    assert tree.joint[len(shares) + 1 :] == pytest.approx(wanted)
    for path, probability, why in zip(paths, tree.joint, tree.evidence):
        assert everything[path] == pytest.approx(probability)
        assert why == (() if not path else own if path in shares.keys() - both else WHY)


def test_a_raised_node_raises_those_below_by_the_drafters_own_share():
    """Not by the ratio of their expected acceptances, which a flat curve makes 1."""
    drafted = Drafted(Candidates.of(0), [1.0, 0.6, 0.8, 0.1])
    for parent, token in ((0, 1), (1, 2), (1, 3)):
        drafted.tree.add(parent, token, 0.5, WHY)
    tree = grow([0], followers_of({0: {1: 0.9}}), 0, 0.0, 9, 3, None, drafted)
    assert tree.joint == pytest.approx([1.0, 0.9, 0.72, 0.5])


def test_a_drafted_node_that_no_cache_offers_keeps_its_expected_acceptance():
    """It may be less than the drafter's own probabilities, which are overconfident."""
    drafted = Drafted(Candidates.of(0), [1.0, 0.9, 0.9, 0.9])
    for parent, token, joint in ((0, 1, 0.5), (1, 2, 0.3), (0, 3, 0.2)):
        drafted.tree.add(parent, token, joint, WHY)
    tree = grow([0], followers_of({0: {3: 0.4}}), 0, 0.0, 9, 3, None, drafted)
    assert tree.joint == [1.0, 0.5, 0.3, 0.4]


def test_the_best_nodes_keep_their_parents():
    tree = Candidates.of(7)
    for parent, token, joint in ((0, 1, 0.5), (0, 2, 0.9), (1, 3, 0.5), (2, 4, 0.6), (2, 5, 0.1)):
        tree.add(parent, token, joint, WHY)
    best = tree.best(3)  # of two alike the parent
    assert [path[1:] for path in best.paths([])] == [(), (1,), (2,), (2, 4)]
    assert (best.joint, best.depths) == ([1.0, 0.5, 0.9, 0.6], [0, 1, 1, 2])
    assert tree.best(9) == tree


@given(
    st.lists(st.integers(0, 2), max_size=4),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), max_size=6),
)
def test_who_was_judged(accepted, added):
    tree = Candidates.of(7)
    for parent, token in added:
        if parent < len(tree.tokens) and (parent, token) not in zip(tree.parents, tree.tokens):
            tree.add(parent, token, 0.5, (("node", len(tree.tokens), 0),))
    paths = [path[1:] for path in tree.paths([])]
    on_path = [
        tuple(accepted[:n]) for n in itertools.takewhile(lambda n: tuple(accepted[:n]) in paths, range(9))
    ]
    on_path = on_path[: len(accepted) + 1]
    wanted = {}
    for node, path in enumerate(paths):
        if path and path[:-1] in on_path:
            wanted[("node", node, 0),] = path in on_path
    assert dict(tree.judged(accepted)) == wanted


def test_odds_add_up_and_learn():
    known, other = ("text", 2, 0), ("corpus", 3, 1)
    odds = CandidateModel(-1.0, {known: 0.5}, {2: 0.25})
    assert odds((known,)) == pytest.approx(1 / (1 + math.exp(0.5)))
    # unknown offers: 0.7 for each matched token beyond the first, less 0.7 for each rank
    assert odds((known, other)) == pytest.approx(1 / (1 + math.exp(1.0 - 0.25 - 0.5 - 0.7)))
    own = odds.copy()
    for _ in range(2000):
        for accepted in (True, True, True, False):
            own.learn((known, other), accepted)
    assert own((known, other)) == pytest.approx(0.75, abs=0.03)
    assert odds((known,)) == pytest.approx(1 / (1 + math.exp(0.5)))  # the one it is a copy of stays


class FixedCorpus:
    max_prefix = 3

    def next_tokens(self, suffix, limit):
        return Matches([4, 5, 6][:limit], [6, 3, 1], 2, 12)


def test_sources_are_merged():
    text, drafted = ContextCache(2), ContextCache(2)
    text.add([1, 2, 4], PROMPT)
    text.add([2, 3], ACCEPTED)
    drafted.add([2, 5], RECYCLED)
    odds = CandidateModel()
    sources = Sources(text, drafted, FixedCorpus(), odds, width=2)
    both = ((PROMPT, 2, 0), (CORPUS, 2, 1)), ((RECYCLED, 1, 0), (CORPUS, 2, 2))
    assert sources.followers([0, 1, 2]) == {4: (odds(both[0]), both[0]), 5: (odds(both[1]), both[1])}
    sources.corpus = None
    one = ((PROMPT, 2, 0),), ((RECYCLED, 1, 0),)
    assert sources.followers([0, 1, 2]) == {4: (odds(one[0]), one[0]), 5: (odds(one[1]), one[1])}
    sources.text = None
    assert sources.followers([0, 1, 2]) == {5: (odds(one[1]), one[1])}


@pytest.mark.parametrize("count, total, expected", [(9, 9, 0), (5, 9, 0), (4, 8, 1), (2, 8, 2), (1, 999, 4)])
def test_share_classes(count, total, expected):
    assert share_class(count, total) == expected == min(int(math.log2(total / count)), 4)
