"""Prompts to tokens, and tokens to text as they arrive."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from drafttrain.data.chat import encode_prompt
from drafttrain.data.message import Message
from drafttrain.inference.decode import Row
from drafttrain.utils.errors import UserError

# A user's text, a chat ({"role", "content"} dicts or Messages), or token ids, which are used unchanged.
Prompt = str | Sequence[Message | Mapping] | Sequence[int] | torch.Tensor


class Vocabulary(Protocol):
    """A target, or what a stage of a pipeline knows of it."""

    name: str
    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int


def encode(target: Vocabulary, prompt: Prompt) -> list[int]:
    """Return a prompt's token ids. A text becomes one user turn of the chat template, if there is one.

    Raises:
        UserError: it is no prompt, is empty, or has ids outside the vocabulary.
    """
    tokenizer = target.tokenizer
    if isinstance(prompt, torch.Tensor):
        if prompt.ndim == 0 or prompt.numel() != prompt.shape[-1]:
            raise UserError(f"prompt: must be one row of token ids, got shape {list(prompt.shape)}")
        prompt = prompt.reshape(-1).tolist()
    if isinstance(prompt, Mapping) or not isinstance(prompt, Sequence):
        raise _no_prompt(prompt)
    if isinstance(prompt, str) and not prompt:
        raise UserError("prompt: must not be empty; give it some text")
    if not isinstance(prompt, str) and all(type(token) is int for token in prompt):
        if outside := [token for token in prompt if not 0 <= token < target.vocab_size]:
            raise UserError(f"prompt: token ids must be in 0..{target.vocab_size - 1}, got {outside[0]}")
        return list(prompt)
    if not isinstance(prompt, str) and not all(isinstance(turn, Message | Mapping) for turn in prompt):
        raise _no_prompt(prompt)
    if tokenizer is None:
        raise UserError(f"prompt: must be token ids, as {target.name} has no tokenizer, got {shown(prompt)}")
    if not isinstance(prompt, str):
        for turn in prompt:
            fields = dict(turn) if isinstance(turn, Mapping) else vars(turn)
            if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
                raise UserError(f"prompt: a turn's role and content must be texts, got {shown(fields)}")
        return encode_prompt(tokenizer, prompt)
    if tokenizer.chat_template:
        return encode_prompt(tokenizer, [Message("user", prompt)])
    return tokenizer(prompt)["input_ids"]


def is_batch(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Return whether this is a list of prompts: of texts, of chats, or of token ids."""
    if isinstance(prompt, torch.Tensor):
        return prompt.ndim == 2 and len(prompt) > 1
    if isinstance(prompt, str | Mapping) or not isinstance(prompt, Sequence) or not len(prompt):
        return False
    return all(isinstance(one, str | list | tuple | torch.Tensor) for one in prompt)


def _no_prompt(prompt: object) -> UserError:
    return UserError(
        "prompt: must be a text, a chat (dicts with role and content), token ids, or a list of such prompts, "
        f"got {shown(prompt)}"
    )


def shown(value: object) -> str:
    """Return how a message shows what a caller gave."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class StopStrings:
    """Pass text through up to the stop string that is complete first; hold back a possible beginning of one.

    Raises:
        UserError: a string is empty.
    """

    def __init__(self, strings: Sequence[str]):
        if not all(strings):
            raise UserError("stop: must not hold an empty text; leave it out")
        self.strings, self.found = list(strings), False
        self._held = ""

    def push(self, text: str) -> str:
        """Add text and return what can no longer begin a stop string; set `found` when one is complete."""
        for character in text if self.strings else "":
            self._held += character  # one by one: the first complete string must not depend on pieces
            if complete := [string for string in self.strings if self._held.endswith(string)]:
                self.found = True
                given, self._held = self._held[: -max(map(len, complete))], ""
                return given
        self._held = self._held if self.strings else text
        keep = max((self._overlap(string) for string in self.strings), default=0)
        at = len(self._held) - keep
        given, self._held = self._held[:at], self._held[at:]
        return given

    def flush(self) -> str:
        """Return the text still held back, when no more follows."""
        given, self._held = self._held, ""
        return given

    def _overlap(self, string: str) -> int:
        """Return the length of the longest end of the held text that the string begins with."""
        longest = min(len(string) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if string.startswith(self._held[-n:])), 0)


class TextStream:
    """Decode tokens to text as they arrive; the pieces add up to the text of all tokens decoded at once.

    A token may hold part of a character, and its text may depend on the token before it. So each new token is
    decoded together with those of the last piece, and no text is returned while it ends in a replacement
    character.

    Args:
        tokenizer: None gives no text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None):
        self.tokenizer = tokenizer
        self._given: list[int] = []  # tokens of the last piece
        self._waiting: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that is now certain."""
        return "".join(self._next(token) for token in token_ids)

    def flush(self) -> str:
        """Return the text of the remaining tokens, including an incomplete character."""
        return self._give()

    def _next(self, token: int) -> str:
        self._waiting.append(token)
        return "" if self._decode(self._given + self._waiting).endswith("\ufffd") else self._give()

    def _give(self) -> str:
        text = self._decode(self._given + self._waiting)[len(self._decode(self._given)) :]
        # tokens without text of their own do not move the window: the next one is decoded after one with text
        self._given, self._waiting = self._waiting if text else self._given + self._waiting, []
        return text

    def _decode(self, token_ids: list[int]) -> str:
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class OutputText:
    """The text of one output, up to the first of its stop strings."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str]):
        self.stream, self.stops = TextStream(tokenizer), StopStrings(stop)

    def push(self, row: Row) -> tuple[str, list[int]]:
        """Return the text that a row's last forward adds, and its tokens; a stop string ends the row."""
        text = ""
        for i, token in enumerate(row.tokens, 1):
            text += self.stops.push(self.stream.push([token]))
            if self.stops.found:
                row.finish_reason = "stop"
                return text, row.tokens[:i]
        if row.finish_reason:
            text += self.stops.push(self.stream.flush())
            if self.stops.found:
                row.finish_reason = "stop"
            else:
                text += self.stops.flush()
        return text, row.tokens
