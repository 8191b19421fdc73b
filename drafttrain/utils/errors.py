"""The one exception that users are meant to see."""


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
