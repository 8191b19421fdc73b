"""Read traces of `drafttrain reason` as training chats, one for each answer that is long enough for drafts.

A drafter for a reasoning program learns most from the target's answers in that program. Trees of evaluation
problems are left out as a whole, like any conversation with an evaluation prompt (`corpus.exclude`).
"""

from collections.abc import Iterator
from typing import Any

from drafttrain.utils.errors import UserError

SHORT = 16  # answers limited to this many tokens or fewer, such as scores, get no drafts (`scheduler.short`)
_SUMMARY = {"trees", "without_result"}  # keys of the sums over all trees, stored next to the traces


def rows_of_trees(value: dict[str, Any], source: str) -> Iterator[dict[str, Any]] | None:
    """Return the rows of a trace as OpenAI messages, no rows for a summary of traces, None for other values.

    Answers have the token ids that were generated, up to and including the stop text. Answers that had to
    begin with given words have no ids: their text is tokenized with those words. `tree_of` is the problem.

    Raises:
        UserError: while the rows are read: the trace is damaged; the message begins with `source`.
    """
    if _SUMMARY <= value.keys():
        return iter(())
    return _answers(value, source) if {"rounds", "format_version"} <= value.keys() else None


def _answers(trace: dict[str, Any], source: str) -> Iterator[dict[str, Any]]:
    try:
        problem, number = trace["problem"], 0
        if not isinstance(problem["text"], str) or not problem["text"]:
            raise TypeError("problem without text")
        for entry in trace["rounds"]:
            for call in entry["calls"]:
                if call["max_new_tokens"] > SHORT and call["error"] is None and call["token_ids"]:
                    yield _row(f"{problem['id']}_{number}", problem["text"], call)
                    number += 1
    except (KeyError, TypeError) as error:
        raise UserError(f"{source}: damaged trace ({error!r}); remove it, and make it again") from None


def _row(id: str, problem: str, call: dict[str, Any]) -> dict[str, Any]:
    asked, begin = call["prompt"], call["begin"]
    chat = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    answer = {"role": "assistant", "content": begin + call["text"]}
    if not begin:
        answer["token_ids"] = call["token_ids"]
    messages = [*chat, answer]
    return {"id": id, "messages": messages, "finish_reason": call["finish_reason"], "tree_of": problem}
