"""The one exception that users are meant to see."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake that the user can correct. The message is one line: what is wrong, where, and the remedy."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def brief(reason: object, limit: int = 200) -> str:
    """Shorten another library's message to one line of at most `limit` characters: to whole sentences if they
    keep half of it or more, else to whole words. "…" marks what is left out."""
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
    """Return the remedy for a mistyped name: its closest match among `names`, or `otherwise`.

    Args:
        prefix: shown before the name.
    """
    close = difflib.get_close_matches(name, list(names), 1)
    return f"did you mean {prefix}{close[0]}?" if close else otherwise
