"""The one exception that users are meant to see."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake the user can mend. The message is one line: what went wrong, where, how to mend it."""


def brief(reason: object, limit: int = 200) -> str:
    """What another library says, on one line of at most `limit` characters: whole sentences where half of it
    or more can be kept so, else whole words. "…" stands for what is left out."""
    text = " ".join(str(reason).split())
    if len(text) <= limit:
        return text
    start = text[: limit - 1]  # and "…"
    end = max(start.rfind(mark) for mark in (". ", "; ", "! ", "? ")) + 1
    if end < limit // 2:
        end = start.rfind(" ") if text[limit - 1].isalnum() and " " in start else len(start)
        return start[:end].rstrip(" ,;:(") + "…"
    return start[:end].rstrip(";") + " …"


def did_you_mean(name: str, names: Iterable[str], otherwise: str = "", prefix: str = "") -> str:
    """Return the remedy for a mistyped name: the closest of those that there are, or `otherwise`.

    Args:
        prefix: shown before the name.
    """
    close = difflib.get_close_matches(name, list(names), 1)
    return f"did you mean {prefix}{close[0]}?" if close else otherwise
