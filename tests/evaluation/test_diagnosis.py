"""The judgement of drafts, on made-up ones; spoiled drafters are in tests/training."""

import io
import random

import pytest
from rich.console import Console

from drafttrain.evaluation.diagnose import show
from drafttrain.evaluation.diagnosis import (
    Change,
    chain_len,
    diagnose_drafts,
    differ,
    grouped,
    is_in_code,
    kind_of_text,
    ranked,
)
from drafttrain.evaluation.drafts import Draft

LENGTH = 4


def draft(depth, accepted, position=0, context=10, text=" word", rank=0, probability=0.5, before="a", id=7):
    return Draft(0, depth, position, context, accepted, id, before, text, probability, rank, 0.1, 0.0)


def decode(chains, is_accepted, **values):
    """Return the drafts that chains reach, one after the other in an answer."""
    drafts, position = [], 0
    for _ in range(chains):
        for depth in range(1, LENGTH + 1):
            drafts.append(draft(depth, is_accepted(depth, position), position=position, **values))
            position += 1
            if not drafts[-1].accepted:
                break
        else:
            position += 1  # the target's own token
    return drafts


def test_the_length_of_chains_is_that_of_the_decode():
    """Chains of full length: the product of the rates is the mean of the lengths."""
    rng = random.Random(0)
    drafts = decode(400, lambda depth, position: rng.random() < 0.9 - 0.1 * depth)
    mean = 1 + sum(one.accepted for one in drafts) / 400
    assert chain_len(drafts) == pytest.approx(mean, abs=1e-9)
    assert diagnose_drafts(drafts).accept_len == chain_len(drafts)
    assert diagnose_drafts(drafts, accept_len=1.5).accept_len == 1.5


def test_all_and_none_accepted():
    assert chain_len(decode(30, lambda depth, position: True)) == LENGTH + 1
    assert chain_len(decode(30, lambda depth, position: False)) == 1
    assert chain_len([]) == 1


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (" 12", "number"),
        ("3rd", "number"),
        ("\n\n", "space or line"),
        ("", "space or line"),
        ("?!", "punctuation"),
        (" (", "punctuation"),
        (" cat", "start of a word"),
        ("ing", "inside a word"),
        ("日", "inside a word"),
    ],
)
def test_kinds_of_tokens(text, kind):
    assert kind_of_text(text) == kind


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("Here it is:\n```python\nx", True),
        ("Here it is:\n```python\nx = 1\n```\nIt sets", False),
        ("def f(x):\n", True),
        ("def f(x):\n    return x", True),
        ("    if x > 1:\n        y += 2\n\n        for", True),
        ("#include <stdio.h>\n\nint", True),
        ("import numpy as np\n", True),
        ("let x = 3;\nlet", True),
        ("", False),
        ("A river is water that flows. For example:\n\n1. The Rhine\n    - in Germany", False),
        ("while it rains, we stay\nif it does not, we go", False),
        ("I import cars from Japan, which pays.", False),
        ("The sum is 3 + 4 = 7.", False),
        ("x = 5\ny = 12", False),
        ("- apples;\n- pears;", False),
    ],
)
def test_code_has_no_need_of_fences(text, code):
    assert is_in_code(text) == code


def test_groups_are_in_order_and_whole():
    drafts = [draft(1, True, position=p) for p in (300, 3, 40, 17, 5)]
    groups = diagnose_drafts(drafts).tables["position in the answer"]
    assert [one.name for one in groups] == ["0 to 16", "16 to 32", "32 to 64", "256 and more"]
    for table in diagnose_drafts(drafts).tables.values():
        assert sum(one.drafts for one in table) == 5
    ranks = [draft(1, False, rank=rank) for rank in (None, 0, 1, 3, 16)]
    names = [one.name for one in diagnose_drafts(ranks).tables["rank of the target's token"]]
    assert names == ["1", "2", "3 to 4", "17 and more", "outside the draft vocabulary"]
    rare = [draft(1, False, id=id) for id in (1, 2, *[3] * 4, *[4] * 17)]
    groups = diagnose_drafts(rare).tables["occurrences of the token"]
    assert [(one.name, one.drafts) for one in groups] == [("1", 2), ("2 to 4", 4), ("17 and more", 17)]
    [one] = grouped([draft(1, True, probability=0.2), draft(1, False, probability=0.4)], lambda one: "x")
    assert (one.drafts, one.accepted, one.probability) == (2, 0.5, pytest.approx(0.3))


def test_few_drafts_and_small_gaps_are_not_called_different():
    good, bad = [draft(1, True)] * 24, [draft(1, False)] * 400
    assert not differ(bad, good) and differ(bad, good + good)
    nearly = [draft(1, i % 100 < 58) for i in range(200)], [draft(1, i % 100 < 60) for i in range(200)]
    assert not differ(*nearly) and not differ(bad, bad)


def causes(drafts, max_length=None):
    return {one.cause: one for one in diagnose_drafts(drafts, max_length).changes}


def test_each_cause_alone():
    rng = random.Random(1)

    def often(depth, position):
        return rng.random() < 0.7

    assert causes(decode(300, often)) == {}
    answers = [decode(60, lambda depth, at: rng.random() < (0.9 if at < 64 else 0.3)) for _ in range(8)]
    late = causes([one for answer in answers for one in answer])
    assert late.keys() == {"long answers"} and late["long answers"].gain > 0.5
    deep = causes(decode(300, lambda depth, position: rng.random() < (0.9 if depth == 1 else 0.3)))
    assert "depth" in deep and deep["depth"].gain > 1
    long = decode(100, often) + decode(300, lambda depth, position: rng.random() < 0.2, context=600)
    assert "long contexts" in causes(long, 512) and "long contexts" not in causes(long)
    numbers = decode(100, often) + decode(200, lambda depth, position: rng.random() < 0.2, text=" 12")
    assert "tokens: number" in causes(numbers)
    outside = decode(100, often) + [draft(1, False, rank=None)] * 60
    assert causes(outside)["vocabulary"].gain > 0.2


def test_what_more_children_bring():
    """Of four drafts three have the target's token among the first two."""
    drafts = [draft(1, rank == 0, rank=rank) for rank in (0, 0, 1, 5)] * 10
    assert diagnose_drafts(drafts).trees == {2: 1.75, 3: 1.75, 5: 1.75}


def test_what_longer_chains_bring():
    """Half of the drafts at every depth, as far as enough of them are reached."""
    drafts = [draft(depth, i % 2 == 0) for depth in (1, 2, 3) for i in range(40)]
    drafts += [draft(4, True)] * 3
    assert chain_len(drafts, length=2) == 1.75
    assert chain_len(drafts, length=6) == 1.875 + 0.125 * (1 + 0.5 + 0.25)
    assert diagnose_drafts(drafts).chains == {n: chain_len(drafts, length=n) for n in (8, 12)}


def test_what_a_larger_vocabulary_brings_is_printed_where_it_is_no_cause():
    """Two drafts in 30 are outside: too few for a cause."""
    drafts = [draft(1, rank == 0, rank=rank) for rank in [0] * 14 + [1] * 14 + [None] * 2]
    found = diagnose_drafts(drafts)
    assert found.vocabulary_gain == pytest.approx(14 / 28 - 14 / 30) and not found.changes
    assert "all tokens in the draft vocabulary, about +0.03\n" in printed(found)
    assert diagnose_drafts(drafts[:28]).vocabulary_gain == 0


def test_an_unknown_gain_has_the_bound_of_accepting_everything():
    found = diagnose_drafts([draft(1, i % 2 == 0) for i in range(40)], accept_len=1.5)
    found.changes = [Change("a", "why", "remedy", None, True), Change("b", "why", "remedy", 0.25)]
    text = printed(found)
    assert "1. a (gain unknown, at most +3.50): why" in text and "2. b (about +0.25): why" in text


def printed(diagnosis):
    console = Console(file=io.StringIO(), width=200)
    show(diagnosis, LENGTH, console)
    return console.file.getvalue()


def test_what_is_certain_comes_first():
    changes = [Change("a", "", "", 0.1), Change("b", "", "", None, True), Change("c", "", "", 0.9)]
    assert [one.cause for one in ranked(changes)] == ["b", "c", "a"]
