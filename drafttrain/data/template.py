"""Render a conversation with a chat template, as the target was trained on it."""

import os
import re
from dataclasses import replace
from datetime import date
from functools import lru_cache

from transformers import PreTrainedTokenizerBase

from drafttrain.data.message import Message
from drafttrain.utils.errors import UserError, brief

# Some templates print today's date into the system prompt; a corpus must not depend on the day on which it
# was made. The date is the default of Llama-3.1's template, which takes another as `date_string`.
TODAY = date(2024, 7, 26)
TEMPLATE_OPTIONS = {"date_string": TODAY.strftime("%d %b %Y")}
_FORMAT = re.compile(r"strftime_now\(\s*(['\"])(.*?)\1")
SECONDS, MEMORY, LONGEST = 3.0, 2 << 30, 1 << 26  # limits of rendering one chat: time, bytes, characters


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the tokenizer's default chat template.

    Raises:
        UserError: it has none.
    """
    if not tokenizer.chat_template:
        name = os.fspath(tokenizer.name_or_path) or type(tokenizer).__name__
        raise UserError(
            f"{name}: no chat template in this tokenizer; use an instruction-tuned target, add a "
            "chat_template.jinja to its folder, or train on plain text only"
        )
    return tokenizer.get_chat_template()


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    source: str,
    generation_prompt: bool = False,
    open_end: bool = False,
) -> str:
    """Return the text of a chat.

    Args:
        generation_prompt: append the header of the next assistant turn.
        open_end: end with the content of the last message, so that a model continues it.

    Raises:
        UserError: no chat template, or one that refuses these turns, or takes too much time or memory.
    """
    from drafttrain.utils.limits import bounded  # imported here, as training on stored ids does not need it

    template = template_of(tokenizer)
    try:
        with bounded(SECONDS, MEMORY):  # a template is a program that comes with the model
            text = tokenizer.apply_chat_template(
                [{"role": message.role, "content": message.content} for message in messages],
                tokenize=False,
                add_generation_prompt=generation_prompt,
                continue_final_message=open_end,
                chat_template=_on_one_day(template),
                **TEMPLATE_OPTIONS,
            )
        if len(text) > LONGEST:
            raise ValueError(f"{len(text):,} characters, at most {LONGEST:,} are taken")
        return text
    except Exception as error:  # a template may raise any exception
        roles = " ".join(message.role for message in messages[:12])
        reason = brief(error) or type(error).__name__
        raise UserError(
            f"{source}: must be turns that the chat template renders, got {roles} ({reason}); fix or "
            "remove the row, or use another template"
        ) from None


@lru_cache(maxsize=8)
def _on_one_day(template: str) -> str:
    """Return a template in which `strftime_now` of each format that it names gives `TODAY`, not today."""
    if "strftime_now" not in template:
        return template
    dates = {form: TODAY.strftime(form) for _, form in _FORMAT.findall(template)}
    known = f"{dates!r}.get(format, {TEMPLATE_OPTIONS['date_string']!r})"
    # the expression at the end keeps a line end after it, which goes after a block
    return f"{{% macro strftime_now(format) %}}{{{{ {known} }}}}{{% endmacro %}}{{{{ '' }}}}{template}"


@lru_cache(maxsize=8)
def _takes_role(tokenizer: PreTrainedTokenizerBase, template: str, role: str) -> bool:
    """Return whether the template shows turns of this role (some raise an exception, some leave them out)."""
    probe = Message(role, "a probing turn")
    user, answer = Message("user", "u"), Message("assistant", "a")
    turns = [probe, user, answer] if role == "system" else [user, answer, probe, answer]
    try:
        return probe.content in render(tokenizer, turns, "")
    except UserError:
        return False


def adapt_roles(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[Message]:
    """Return the messages with system and tool turns as user text where the template lacks those roles."""
    template = template_of(tokenizer)
    turns = list(messages)
    if any(turn.role == "tool" for turn in turns) and not _takes_role(tokenizer, template, "tool"):
        turns = [replace(turn, role="user") if turn.role == "tool" else turn for turn in turns]
    starts = [turn.role for turn in turns[:2]]
    if starts == ["system", "user"] and not _takes_role(tokenizer, template, "system"):
        turns[:2] = [replace(turns[1], content=turns[0].content + "\n\n" + turns[1].content)]
    return turns
