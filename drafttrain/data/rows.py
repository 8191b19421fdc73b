"""Turn one JSON row of a training file into a conversation: ShareGPT, OpenAI messages, MOSS, instructions,
text.

Keys and spellings are those of real files. Unknown roles are errors: under a wrong role, text would be
trained on or left out unnoticed.
"""

import json
import re
from collections import Counter
from typing import Any

from drafttrain.data.conversation import Conversation
from drafttrain.data.html import html_to_markdown, is_html_answer
from drafttrain.data.message import Message
from drafttrain.utils.errors import UserError

_ROLES = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
_TURN_KEYS = {"sharegpt": ("conversations", "conversation"), "messages": ("messages", "traj")}
_EXCHANGE_KEYS = (
    ("instruction", ("output", "response")),
    ("question", ("answer", "response")),
    ("prompt", ("response", "completion")),
)
_CHAT_KEYS = {"chat", *(key for keys in _TURN_KEYS.values() for key in keys)}
_CHAT_KEYS |= {question for question, _ in _EXCHANGE_KEYS}
_REASONING = ("reasoning_content", "reasoning", "thinking")  # keys of turns, beside the content
_NO_INPUT = re.compile(r"\W*no\s?input\W*", re.IGNORECASE)
_CALCULATOR = re.compile(r"<<[^<>\n]*>>")  # GSM8K: "48/2 = <<48/2=24>>24"
_MOSS_MARKS = re.compile(r"^<\|(?:Human|MOSS)\|>:\s*|\s*<eo[hm]>\s*$")


def row_to_conversation(
    row: Any, format: str, id: str, source: str, skipped: Counter, repairs: Counter
) -> Conversation | None:
    """Return the conversation of one row, or None for a row to skip.

    Args:
        row: decoded JSON.
        format: "sharegpt", "messages", "alpaca" (any single exchange), "text" or "oanc", or "auto": by the
            row's keys.
        id: used if the row has none.
        source: such as "file.json:row 12", for error messages.
        skipped: receives the reason when None is returned.
        repairs: receives the number of changes by kind.

    Raises:
        UserError: a row without the format's keys, an unknown role, or content that is no text.
    """
    if not isinstance(row, dict):
        raise _wrong(source, "a JSON object", row)
    for key in ("id", "conversation_id", "question_id", "task_id"):
        if row.get(key) not in (None, ""):
            id = well_formed(str(row[key]))
            break
    messages = _messages(row, format, source, repairs)
    if messages is None:
        raise UserError(
            f"{source}: must have conversations, messages, instruction/output or text, or the keys of format "
            f"{format}, got {', '.join(list(row)[:8])}; rename keys, or the format"
        )
    if row.get("label") is False:
        skipped["answer labelled as bad"] += 1
        return None
    if row.get("tools"):
        repairs["definitions of tools left out"] += 1
    if not messages:
        skipped["no turns"] += 1
        return None
    for message in messages:
        if (repaired := well_formed(message.content)) != message.content:
            message.content = repaired
            repairs["broken characters replaced"] += 1
    problem = well_formed(str(row.get("tree_of") or "")) or None
    return Conversation(id, messages, source, row.get("tokenizer_hash"), problem)


def is_exchange(row: dict) -> bool:
    """Return whether a row has a key of a chat or of a question with an answer, with any value."""
    return not _CHAT_KEYS.isdisjoint(row)


def well_formed(text: str) -> str:
    r"""Return text without lone surrogates, which JSON can escape ("\ud83d") but UTF-8 cannot encode."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _messages(row: dict, format: str, source: str, repairs: Counter) -> list[Message] | None:
    """Return the row's turns, or None if it has none of the format's keys."""
    if (turns := _listed(row, format)) is not None:
        return _system(row) + _turns(turns, source, repairs)
    if format in ("sharegpt", "auto") and isinstance(row.get("chat"), dict):
        return _moss_turns(row["chat"], source)
    if format in ("alpaca", "auto"):
        for question, answers in _EXCHANGE_KEYS:
            if isinstance(row.get(question), str):
                return _system(row) + _history(row) + _exchange(row, question, answers)
    if format in ("text", "oanc", "auto") and isinstance(row.get("text"), str):
        return [Message("text", row["text"])]
    return None


def _listed(row: dict, format: str) -> list | None:
    """Return the row's list of turns; None if it has none under the keys of this format."""
    names = _TURN_KEYS if format == "auto" else (format,)
    lists = (row.get(key) for name in names for key in _TURN_KEYS.get(name, ()))
    return next((turns for turns in lists if isinstance(turns, list)), None)


def _system(row: dict) -> list[Message]:
    texts = (row.get(key) for key in ("system", "system_prompt"))
    return [Message("system", text) for text in texts if isinstance(text, str)][:1]


def _history(row: dict) -> list[Message]:
    """Return the earlier exchanges of an Alpaca row, which LLaMA-Factory has as pairs of texts in `history`;
    a `history` with other values belongs to another format and gives none."""
    pairs = row.get("history")
    is_pairs = isinstance(pairs, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
    if not is_pairs or not all(isinstance(text, str) for pair in pairs for text in pair):
        return []
    return [Message(role, text) for pair in pairs for role, text in zip(("user", "assistant"), pair)]


def _turns(turns: list, source: str, repairs: Counter) -> list[Message]:
    messages = []
    for number, turn in enumerate(turns, 1):
        where = f"{source}: turn {number}"
        if not isinstance(turn, dict):
            raise _wrong(where, "an object with role and text", turn)
        spelling = turn.get("from", turn.get("role"))
        role = _ROLES.get(spelling.strip().lower()) if isinstance(spelling, str) else None
        if role is None:
            raise UserError(
                f"{where}: role must be one of {', '.join(_ROLES)}, got {spelling!r}; fix or remove the turn"
            )
        content = _content(turn, where)
        ids = turn.get("token_ids") if role == "assistant" else None
        if not isinstance(ids, list | None):
            raise _wrong(f"{where}: token_ids", "a list", ids)
        if role == "assistant" and ids is None and is_html_answer(content):
            content = html_to_markdown(content)
            repairs["HTML answers turned into Markdown"] += 1
        if role == "assistant" and any(turn.get(key) for key in _REASONING):
            repairs["reasoning beside answers left out"] += 1
        if role == "assistant" and turn.get("weight") == 0:  # in OpenAI's files: not to be learned
            repairs["answers of weight 0 kept"] += 1
        messages.append(Message(role, content, ids))
    return messages


def _content(turn: dict, where: str) -> str:
    """Return a turn's text: a string or a list of text parts, and the tool calls after it."""
    content = turn.get("value", turn.get("content"))
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise _wrong(f"{where}: content", "text in all parts", content)
        content = "\n".join(parts)
    if not isinstance(content, str | None):
        raise _wrong(f"{where}: content", "text", content)
    calls = turn.get("tool_calls") or ([turn["function_call"]] if turn.get("function_call") else [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        if content:
            return content
        raise _wrong(f"{where}: tool calls", "a list of objects", calls)
    written = (json.dumps(call.get("function", call), ensure_ascii=False) for call in calls)
    return "\n".join(filter(None, [content, *written]))


def _moss_turns(chat: dict, source: str) -> list[Message]:
    """Return the turns of MOSS-003 (turn_1, …, turn_10) in numerical order, without their marks."""
    messages = []
    for name in sorted(chat, key=lambda name: int(re.sub(r"\D", "", name) or 0)):
        where = f"{source}: {name}"
        if not isinstance(chat[name], dict):
            raise _wrong(where, "an object with Human and MOSS", chat[name])
        for key, role in (("Human", "user"), ("MOSS", "assistant")):
            content = _content({"value": chat[name].get(key)}, where)
            messages.append(Message(role, _MOSS_MARKS.sub("", content)))
    return messages


def _exchange(row: dict, question: str, answers: tuple[str, ...]) -> list[Message]:
    prompt = row[question]
    for extra in (row.get("context"), row.get("input")):  # Dolly's key, and Alpaca's
        if isinstance(extra, str) and extra.strip() and not _NO_INPUT.fullmatch(extra.strip()):
            prompt = f"{prompt}\n\n{extra}"
    answer = next((row[key] for key in answers if isinstance(row.get(key), str)), "")
    if question == "question":
        answer = _CALCULATOR.sub("", answer)
    return [Message("user", prompt), Message("assistant", answer)]


def _wrong(where: str, expected: str, value: Any) -> UserError:
    return UserError(f"{where}: must be {expected}, got a {type(value).__name__}; fix or remove the row")
