"""Encoding of prompts, and decoding of tokens to text as they arrive."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from drafttrain.data.chat import encode_prompt
from drafttrain.data.message import Message
from drafttrain.inference.decode import Row
from drafttrain.inference.stats import DecodeStats
from drafttrain.utils.errors import UserError

# A user's text, a chat ({"role", "content"} dicts or Messages), or token ids, which are used unchanged.
Prompt = str | Sequence[Message | Mapping] | Sequence[int] | torch.Tensor


class Vocabulary(Protocol):
    """Name, tokenizer and vocabulary size, from a target or from a stage of a pipeline."""

    name: str
    tokenizer: PreTrainedTokenizerBase | None
    vocab_size: int


def encode(target: Vocabulary, prompt: Prompt) -> list[int]:
    """Return a prompt's token ids. A text becomes one user turn of the chat template, if there is one.

    Raises:
        UserError: it is no prompt, an empty text, or has ids outside the vocabulary.
    """
    tokenizer = target.tokenizer
    if isinstance(prompt, torch.Tensor):
        if prompt.ndim == 0 or prompt.numel() != prompt.shape[-1]:
            raise UserError(f"prompt: must be one row of token ids, got shape {list(prompt.shape)}")
        prompt = prompt.reshape(-1).tolist()
    if isinstance(prompt, Mapping | bytes | bytearray) or not isinstance(prompt, Sequence):
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
    if isinstance(prompt, str):
        _require_unicode(prompt)
    else:
        for turn in prompt:
            fields = dict(turn) if isinstance(turn, Mapping) else vars(turn)
            if not all(isinstance(fields.get(name), str) for name in ("role", "content")):
                raise UserError(f"prompt: a turn's role and content must be texts, got {shown(fields)}")
            _require_unicode(fields["role"])
            _require_unicode(fields["content"])
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


def _require_unicode(text: str) -> None:
    if any("\ud800" <= character <= "\udfff" for character in text):  # half of one that JSON or a shell broke
        raise UserError(f"prompt: must be whole characters, got {shown(text)}; correct its encoding")


def _no_prompt(prompt: object) -> UserError:
    return UserError(
        "prompt: must be a text, a chat (dicts with role and content), token ids, or a list of such prompts, "
        f"got {shown(prompt)}"
    )


def shown(value: object) -> str:
    """Return a value's repr for messages, cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


class TextStream:
    """Streaming detokenizer, whose pieces add up to the text of all tokens decoded at once.

    A token may hold part of a character, and its text may depend on the token before it. So new tokens are
    decoded together with some of those before, and no text is returned while it ends in a replacement
    character or in a token for a byte: such bytes are decoded with those that follow.

    Args:
        tokenizer: None: all pieces are empty.
    """

    WINDOW = 8  # tokens that are decoded again at most, as long as each piece has text

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None):
        self.tokenizer = tokenizer
        self._given: list[int] = []  # the last tokens whose text was returned
        self._text = ""  # the text of those
        self._waiting: list[int] = []

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that is now certain."""
        if not token_ids:
            return ""
        whole = self._decode([*self._given, *self._waiting, *token_ids])
        is_open = whole.endswith("\ufffd") or self._is_byte(token_ids[-1])
        if len(token_ids) > 1 and (is_open or any(map(self._is_byte, token_ids))):
            return "".join(self.push([token]) for token in token_ids)
        self._waiting += token_ids
        return "" if is_open else self._give(whole)

    def flush(self) -> str:
        """Return the text of the remaining tokens, including an incomplete character."""
        return self._give(self._decode(self._given + self._waiting)) if self._waiting else ""

    def _give(self, whole: str) -> str:
        """Return the text of the waiting tokens, from the text of all in the window."""
        text = whole[len(self._text) :]
        self._given, self._text = self._given + self._waiting, whole
        # a piece without text does not begin the window, so that later tokens are decoded after some text
        if text and len(self._given) > self.WINDOW:
            self._given, self._text = self._waiting, self._decode(self._waiting)
        self._waiting = []
        return text

    def _is_byte(self, token: int) -> bool:
        """Return whether a token is a SentencePiece byte of a multi-byte character, such as <0xE4>."""
        piece = None if self.tokenizer is None else self.tokenizer.convert_ids_to_tokens(token)
        return isinstance(piece, str) and len(piece) == 6 and piece[:3] == "<0x" and piece[3] > "7"

    def _decode(self, token_ids: list[int]) -> str:
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class OutputText:
    """Text of one output, up to its first stop string.

    Args:
        stop: strings that end the output; they need a tokenizer.
        stats: statistics from which the tokens after a stop string are removed; None: the caller does it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        stop: Sequence[str],
        stats: DecodeStats | None = None,
    ):
        self.stream, self.stops = TextStream(tokenizer), None
        if stop:
            from drafttrain.inference.stop import StopStrings  # only outputs with stop strings need it

            self.stops = StopStrings(stop, tokenizer, stats)

    def push(self, row: Row) -> tuple[str, list[int]]:
        """Return the text that a row's last forward adds, and its tokens; a stop string ends the row."""
        if self.stops is not None:
            return self.stops.read(self.stream, row)
        return self.stream.push(row.tokens) + (self.stream.flush() if row.finish_reason else ""), row.tokens

    def flush(self) -> str:
        """Return the text held back so far, for an output that ends without a finish reason."""
        if self.stops is None:
            return self.stream.flush()
        return "" if self.stops.found else self.stops.push(self.stream.flush()) + self.stops.flush()
