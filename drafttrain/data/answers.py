"""Find the assistant's turns in the text of a rendered conversation.

The chat is rendered once, and each assistant turn is located by rendering the turns before it with the
generation prompt. Positions are in characters; `loss_mask.py` converts them to tokens.
"""

import os
import re
from functools import lru_cache

from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from drafttrain.data.chat import tokenize
from drafttrain.data.message import Message
from drafttrain.data.template import TEMPLATE_OPTIONS, render, template_of
from drafttrain.utils.errors import UserError


class RenderedOtherwise(UserError):
    """The template changes an answer, or renders it differently once further turns follow."""


@lru_cache(maxsize=8)
def end_of_turn_text(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    """Return the text that ends an assistant turn, at which the model stops; "" if there is none.

    That is the first special token after the answer ("<|im_end|>" but not the newline after it), or, if no
    special token follows, the text that follows the answer both at the end and before another turn.
    """
    answer = "a probing answer"
    turns = [Message("user", "u"), Message("assistant", answer)]
    last = render(tokenizer, turns, "chat template").partition(answer)[2]
    special = {
        token for token in (*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()) if token.strip()
    }
    special = sorted(special, key=len, reverse=True)  # the longest first: a token may be a prefix of another
    found = re.match(r"\s*(" + "|".join(map(re.escape, special)) + ")", last) if special else None
    if found:
        return found[1]
    middle = render(tokenizer, [*turns, turns[0]], "chat template").partition(answer)[2]
    return os.path.commonprefix([last, middle]).strip()


def end_of_turn_ids(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of the text that ends an assistant turn; [] if there is none."""
    return tokenize(tokenizer, end_of_turn_text(tokenizer, template_of(tokenizer)))


def answer_spans(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], text: str, source: str
) -> dict[int, tuple[int, int]]:
    """Locate the assistant turns in the rendered text.

    Returns:
        (start, end) in characters by message index; start is the end of the generation prompt, end is after
        the end-of-turn token.

    Raises:
        UserError: the chat starts with an assistant turn.
        RenderedOtherwise: an answer cannot be found.
    """
    end_of_turn = end_of_turn_text(tokenizer, template_of(tokenizer))
    answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    if answers and answers[0] == 0:
        raise UserError(f"{source}: must start with a user turn, got an assistant turn; add one before it")
    spans, floor = {}, 0
    for index in answers:
        before = render(tokenizer, messages[:index], source, generation_prompt=True)
        found = None
        if text.startswith(before) and len(before) >= floor:
            found = _end_of_answer(text, len(before), messages[index].content.strip(), end_of_turn)
        if found is None:
            return _marked_spans(tokenizer, messages, text, source, answers, end_of_turn)
        spans[index] = (len(before), found)
        floor = found
    return spans


def _end_of_answer(text: str, start: int, content: str, end_of_turn: str) -> int | None:
    """Return the position after the end-of-turn token that closes `content`, searched from `start` on.

    Some templates insert text between generation prompt and answer (an empty "<think>" block).
    """
    closing = re.compile(r"\s*" + re.escape(end_of_turn))
    while (start := text.find(content, start)) >= 0:
        end = start + len(content)
        if not end_of_turn:
            return end
        if found := closing.match(text, end):
            return found.end()
        start += 1
    return None


def _marked_spans(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    text: str,
    source: str,
    answers: list[int],
    end_of_turn: str,
) -> dict[int, tuple[int, int]]:
    """Return the spans that the template marks with `{% generation %}`, for chats where prefixes differ."""
    template = template_of(tokenizer)
    marks: list[tuple[int, int]] = []
    if re.search(r"\{%-?\s*generation\s*-?%\}", template):
        _, indices = render_jinja_template(
            [[{"role": message.role, "content": message.content} for message in messages]],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**tokenizer.special_tokens_map, **TEMPLATE_OPTIONS},
        )
        marks = indices[0]
    if len(marks) != len(answers):
        raise RenderedOtherwise(
            f"{source}: must be a chat whose answers the template renders unchanged, and the same before "
            "further turns; mark answers in the template with {% generation %} … {% endgeneration %}, or "
            "split the chat into single exchanges"
        )
    spans = {}
    for index, (start, end) in zip(answers, marks, strict=True):
        closing = re.compile(r"\s*" + re.escape(end_of_turn)).match(text, end) if end_of_turn else None
        is_marked = end_of_turn and end_of_turn in text[start:end]
        spans[index] = (start, closing.end() if closing and not is_marked else end)
    return spans
