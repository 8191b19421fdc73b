"""One turn of a chat."""

from dataclasses import dataclass


@dataclass
class Message:
    """One turn.

    Attributes:
        role: "system", "user", "assistant" or "tool"; "text" for the single message of a plain document.
        content: the turn's text; "" where a file has an answer's token_ids alone, until `fill_texts`.
        token_ids: the turn's ids exactly as the target generated them, when known (assistant turns only).
    """

    role: str
    content: str
    token_ids: list[int] | None = None
