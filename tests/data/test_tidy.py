"""Repairs of real chats, and groups that a split must not tear apart."""

from collections import Counter

import pytest

from drafttrain.data.conversation import Conversation
from drafttrain.data.message import Message
from drafttrain.data.tidy import split_groups, tidy

NAMES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def turns(text: str) -> list[Message]:
    """ "u:hello a:" → a user turn "hello" and an empty assistant turn."""
    return [Message(NAMES[turn[0]], turn[2:].replace("_", " ")) for turn in text.split()]


@pytest.mark.parametrize(
    "before, after, repair",
    [
        ("u:1 a:2 u:3 a:4", "u:1 a:2 u:3 a:4", None),
        ("s:0 u:1 a:2", "s:0 u:1 a:2", None),
        ("u:1 a: u:3 a:4", "u:1\n\n3 a:4", "empty turns dropped"),
        ("u:1 a:2 u:_ a:4", "u:1 a:2\n\n4", "empty turns dropped"),
        ("a:0 u:1 a:2", "u:1 a:2", "turns before the first user turn dropped"),
        ("s:0 a:0 t:0 u:1 a:2", "s:0 u:1 a:2", "turns before the first user turn dropped"),
        ("u:1 a:2 u:3", "u:1 a:2", "turns after the last answer dropped"),
        ("u:1 u:2 a:3 a:4", "u:1\n\n2 a:3\n\n4", "repeated roles joined"),
        ("s:0 s:1 u:2 a:3", "s:0\n\n1 u:2 a:3", None),
        ("u:1 a:2 s:3 a:4", "u:1 a:2 u:3 a:4", "late system turns read as user turns"),
        ("u:1 a:2 t:3 a:4", "u:1 a:2 t:3 a:4", None),
        ("u:1 a:2 t: a:4", "u:1 a:2 t: a:4", None),  # a tool may return nothing
    ],
)
def test_repairs(before, after, repair):
    repairs, skipped = Counter(), Counter()
    messages = turns(before)
    tidied = tidy(Conversation("x", messages, "here"), repairs, skipped)
    expected = [(NAMES[turn[0]], turn[2:]) for turn in after.split(" ")]
    assert [(m.role, m.content) for m in tidied.messages] == expected
    assert not skipped
    assert repair is None or repairs[repair] == 1
    assert repair is not None or not repairs
    assert messages == turns(before)  # the caller's are untouched


@pytest.mark.parametrize("before", ["u:1", "a:1", "s:1", "a:1 u:2", "u:1 a:", "u: a:2", "t:1 u:2 t:3"])
def test_chats_without_an_answer(before):
    repairs, skipped = Counter(), Counter()
    assert tidy(Conversation("x", turns(before), "here"), repairs, skipped) is None
    assert skipped == {"no assistant turn": 1}
    assert not repairs


def test_documents():
    document = Conversation("x", [Message("text", "words")], "here")
    assert tidy(document, Counter()) is document
    skipped = Counter()
    assert tidy(Conversation("x", [Message("text", " \n")], "here"), Counter(), skipped) is None
    assert skipped == {"empty document": 1}


def test_ids_survive_unless_answers_are_joined():
    kept = Conversation("x", [Message("user", "1"), Message("assistant", "2", [5])], "here")
    assert tidy(kept, Counter()).messages[1].token_ids == [5]
    kept.messages.append(Message("assistant", "3", [6]))
    assert tidy(kept, Counter()).messages[1] == Message("assistant", "2\n\n3", None)


def test_pieces_of_a_chat_are_one_group():
    assert split_groups(["ab_0", "ab_8", "cd_0", "e", "e"]) == ["ab", "ab", "cd", "e", "e"]


def test_numbering_is_no_group():
    rows = [f"row_{i}" for i in range(5)]
    assert split_groups(rows) == rows
    many = [f"row_{i}" for i in range(101)]
    assert split_groups([*many, "ab_0", "ab_8"]) == [*many, "ab", "ab"]


@pytest.mark.parametrize("ids", [["sharegpt"] * 101, ["a"] * 101 + ["b"], ["x_0"] * 101])
def test_an_id_of_many_rows_names_no_group(ids):
    assert len(set(split_groups(ids))) == len(ids)
    assert split_groups(["a", "a", "b"]) == ["a", "a", "b"] and split_groups(["a"]) == ["a"]
