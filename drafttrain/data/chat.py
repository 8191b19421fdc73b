"""Encode chats for the target with the tokenizer's own chat template, and identify tokenizer and template."""

import hashlib
import json
from collections.abc import Mapping, Sequence

from transformers import PreTrainedTokenizerBase

from drafttrain.data.message import Message
from drafttrain.data.template import adapt_roles, render, template_of

# Texts whose ids differ between tokenizers that share a vocabulary: digits, spaces, scripts, special tokens.
_PROBES = (
    "Hello, world! It's 3.14159 or 2024-07-26; don't you\tthink?\n\n    def f(x): return x**2  # comment",
    "Ünïcödé — “quotes” … 日本語の文章、한국어, Русский текст, العربية, 😀👍🏽, e\u0301 é \u00a0\u200b|",
    "<s></s><unk><|im_start|>user\n<|im_end|><|endoftext|><|eot_id|>[INST] <<SYS>> [/INST]",
    "AAAAAaaaaa  12345678901234567890   \r\n\r\n\t\tsnake_case camelCase http://example.org/?a=1&b=2",
)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message | Mapping]) -> list[int]:
    """Return the ids of a chat up to and including the header of the next assistant turn. If the last turn is
    the assistant's, it is left open, so that the model continues it.

    Args:
        messages: `Message`s or dicts with "role" and "content".

    Raises:
        UserError: no chat template, or one that cannot render these turns.
    """
    turns = [m if isinstance(m, Message) else Message(m["role"], m["content"]) for m in messages]
    begun = bool(turns) and turns[-1].role == "assistant"
    turns = adapt_roles(tokenizer, turns)
    text = render(tokenizer, turns, "prompt", generation_prompt=not begun, open_end=begun)
    if any(turn.content.strip() not in text for turn in turns if turn.role == "user"):
        from drafttrain.data.user_turns import require_user_turns  # for templates that change or drop them

        require_user_turns(tokenizer)
    return tokenize(tokenizer, text)


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a fingerprint of vocabulary, special ids, and the ids of a few probing texts.

    A tokenizer that was converted from another file format has the same fingerprint; one that differs only in
    how it splits digits has another.
    """
    probes = [tokenize(tokenizer, text) for text in _PROBES]
    special = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    return _digest([sorted(tokenizer.get_vocab().items()), special, probes])


def template_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a fingerprint of the chat template; "none" for a tokenizer without one."""
    return _digest(template_of(tokenizer)) if tokenizer.chat_template else "none"


def _digest(value) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()[:16]


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the ids of a text, without the special tokens that the tokenizer adds."""
    return tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
