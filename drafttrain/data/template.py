"""What a chat template makes of a conversation, and where in the text the assistant's words stand.

Everything here is about strings: the chat is rendered once, and the place of each assistant turn is found by
rendering the turns before it with the generation prompt. Knows nothing of tokens.
"""

import os
import re
from dataclasses import replace
from functools import lru_cache

from jinja2.exceptions import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from drafttrain.data.conversation import Message
from drafttrain.utils.errors import UserError

# Llama-3.1 and later print today's date into the system prompt unless told another one; a corpus must not
# depend on the day it was made. The date is the one that the template itself falls back to.
_TEMPLATE_OPTIONS = {"date_string": "26 Jul 2024"}


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The tokenizer's default chat template.

    Raises:
        UserError: it has none.
    """
    if not tokenizer.chat_template:
        name = os.fspath(tokenizer.name_or_path) or type(tokenizer).__name__
        raise UserError(
            f"{name}: this tokenizer has no chat template; use an instruction-tuned target, put a "
            "chat_template.jinja beside its tokenizer.json, or train on plain text only"
        )
    return tokenizer.get_chat_template()


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], source: str, generation_prompt: bool = False
) -> str:
    """Text of a chat, with the header of the next assistant turn if `generation_prompt`.

    Raises:
        UserError: no chat template, or one that refuses these turns; names `source`.
    """
    template_of(tokenizer)
    try:
        return tokenizer.apply_chat_template(
            [{"role": message.role, "content": message.content} for message in messages],
            tokenize=False,
            add_generation_prompt=generation_prompt,
            **_TEMPLATE_OPTIONS,
        )
    except (TemplateError, TypeError, ValueError) as error:
        roles = " ".join(message.role for message in messages[:12])
        raise UserError(
            f"{source}: the chat template cannot render the turns [{roles}]: {' '.join(str(error).split())}; "
            "mend or remove the row, or use another template"
        ) from None


@lru_cache(maxsize=8)
def _takes_role(tokenizer: PreTrainedTokenizerBase, template: str, role: str) -> bool:
    """Whether the template shows turns of this role (some raise an exception, some leave them out)."""
    probe = Message(role, "a probing turn")
    user, answer = Message("user", "u"), Message("assistant", "a")
    turns = [probe, user, answer] if role == "system" else [user, answer, probe, answer]
    try:
        return probe.content in render(tokenizer, turns, "")
    except UserError:
        return False


def adapt_roles(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[Message]:
    """Turns system and tool messages into user text where the template does not take those roles."""
    template = template_of(tokenizer)
    turns = list(messages)
    if any(turn.role == "tool" for turn in turns) and not _takes_role(tokenizer, template, "tool"):
        turns = [replace(turn, role="user") if turn.role == "tool" else turn for turn in turns]
    if (
        len(turns) > 1
        and turns[0].role == "system"
        and turns[1].role == "user"
        and not _takes_role(tokenizer, template, "system")
    ):
        turns[:2] = [replace(turns[1], content=turns[0].content + "\n\n" + turns[1].content)]
    return turns


@lru_cache(maxsize=8)
def end_of_turn_text(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    """What the template puts behind an answer for the model to stop at, "" if nothing.

    That is the first special token behind the answer ("<|im_end|>" but not the newline after it), or, where
    no special token follows, what stands behind the answer whether or not another turn follows.
    """
    answer = "a probing answer"
    turns = [Message("user", "u"), Message("assistant", answer)]
    last = render(tokenizer, turns, "chat template").partition(answer)[2]
    special = {
        token for token in (*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()) if token.strip()
    }
    special = sorted(special, key=len, reverse=True)  # the longest first, should one start another
    found = re.match(r"\s*(" + "|".join(map(re.escape, special)) + ")", last) if special else None
    if found:
        return found[1]
    middle = render(tokenizer, [*turns, turns[0]], "chat template").partition(answer)[2]
    return os.path.commonprefix([last, middle]).strip()


def answer_spans(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], text: str, source: str
) -> dict[int, tuple[int, int]]:
    """Where each assistant turn stands in the rendered text.

    Returns:
        Message index → (start, end) in characters; start is where the generation prompt ends, end is behind
        the end-of-turn token.
    """
    end_of_turn = end_of_turn_text(tokenizer, template_of(tokenizer))
    answers = [i for i, message in enumerate(messages) if message.role == "assistant"]
    if answers and answers[0] == 0:
        raise UserError(f"{source}: the chat starts with an assistant turn; put a user turn before it")
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
    """Place behind the end-of-turn token that closes `content`, looked for from `start` on.

    Some templates put text of their own between generation prompt and answer (an empty "<think>" block).
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
    """Spans from the template's own `{% generation %}` marks, where rendering prefixes does not find them."""
    template = template_of(tokenizer)
    marks: list[tuple[int, int]] = []
    if re.search(r"\{%-?\s*generation\s*-?%\}", template):
        _, indices = render_jinja_template(
            [[{"role": message.role, "content": message.content} for message in messages]],
            chat_template=template,
            return_assistant_tokens_mask=True,
            **{**tokenizer.special_tokens_map, **_TEMPLATE_OPTIONS},
        )
        marks = indices[0]
    if len(marks) != len(answers):
        raise UserError(
            f"{source}: the assistant's words cannot be found in the rendered chat: the template changes "
            "them, or renders earlier turns differently once later ones follow; mark them in the template "
            "with {% generation %} … {% endgeneration %}, or split the chat into single exchanges"
        )
    spans = {}
    for index, (start, end) in zip(answers, marks, strict=True):
        behind = re.compile(r"\s*" + re.escape(end_of_turn)).match(text, end) if end_of_turn else None
        marked = end_of_turn and end_of_turn in text[start:end]
        spans[index] = (start, behind.end() if behind and not marked else end)
    return spans
