"""A message of a chat or document."""

from dataclasses import dataclass


@dataclass
class Message:
    """One turn of a chat, or a plain document.

    Attributes:
        role: "system", "user", "assistant" or "tool"; "text" for the single message of a plain document.
        content: the turn's text; "" for an answer stored as token_ids alone, until `fill_texts` sets it.
        token_ids: the turn's ids exactly as the target generated them, when known (assistant turns only).
    """

    role: str
    content: str
    token_ids: list[int] | None = None
