"""Bring chats into the form that chat templates render, and group the pieces of long ones."""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from drafttrain.data.conversation import Conversation
from drafttrain.data.message import Message


def tidy(conversation: Conversation, repairs: Counter, skipped: Counter | None = None) -> Conversation | None:
    """Bring a chat into the form that chat templates render: [system] (user … assistant)+.

    Real chats have empty turns, start or end in the middle of an exchange and repeat roles.

    Args:
        conversation: as read; it is not changed.
        repairs: receives one count for each kind of repair.
        skipped: receives the reason for returning None.

    Returns:
        The tidy conversation, or None if no answer to a user turn is left.
    """
    done: set[str] = set()
    skipped = Counter() if skipped is None else skipped
    turns = [m for m in conversation.messages if m.content.strip() or m.token_ids or m.role == "tool"]
    if conversation.is_text:
        if not turns:
            skipped["empty document"] += 1
            return None
        return conversation
    if len(turns) < len(conversation.messages):
        done.add("empty turns dropped")

    n_system = next((i for i, turn in enumerate(turns) if turn.role != "system"), len(turns))
    system, turns = turns[:n_system], turns[n_system:]
    if any(turn.role == "system" for turn in turns):
        # Few templates render a system turn here, but all render a user turn.
        done.add("late system turns read as user turns")
        turns = [replace(turn, role="user") if turn.role == "system" else turn for turn in turns]

    first = next((i for i, turn in enumerate(turns) if turn.role == "user"), len(turns))
    if first:
        done.add("turns before the first user turn dropped")
    last = max((i for i, turn in enumerate(turns) if turn.role == "assistant"), default=-1)
    if last < first:
        skipped["no assistant turn"] += 1
        return None
    if last + 1 < len(turns):
        done.add("turns after the last answer dropped")
    turns = turns[first : last + 1]

    joined = _join_repeated(turns)
    if len(joined) < len(turns):
        done.add("repeated roles joined")
    repairs.update(done)
    return replace(conversation, messages=_join_repeated(system) + joined)


def _join_repeated(turns: list[Message]) -> list[Message]:
    joined: list[Message] = []
    for turn in turns:
        if joined and joined[-1].role == turn.role:
            # The token ids of two answers are not those of the joined text, which is tokenized again.
            joined[-1] = Message(turn.role, joined[-1].content + "\n\n" + turn.content)
        else:
            joined.append(turn)
    return joined


def split_groups(ids: Iterable[str]) -> list[str]:
    """Return, for each conversation id, the name of the group that must stay on one side of a split.

    ShareGPT files cut long chats into pieces with ids `X_0`, `X_8`, …: their group is `X`. A prefix that
    covers the whole file, or more than 100 rows, is a numbering ("row_0", "row_1", …), where each row is its
    own group. So is each row of an id that occurs more than 100 times, as it names the data set, not a chat.

    >>> split_groups(["abc_0", "abc_8", "def_0", "other"])
    ['abc', 'abc', 'def', 'other']
    """
    counts = Counter(ids := list(ids))
    many = {name for name, count in counts.items() if count > 100}
    ids = [f"{name} {i}" if name in many else name for i, name in enumerate(ids)]
    prefixes = [match[1] if (match := re.fullmatch(r"(.+)_\d+", name)) else None for name in ids]
    pieces = Counter(prefixes)
    alone = len(pieces) == 1
    return [
        name if prefix is None or alone or pieces[prefix] > 100 else prefix
        for name, prefix in zip(ids, prefixes, strict=True)
    ]
