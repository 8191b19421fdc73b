"""Read the traces of `drafttrain reason`: each answered call is a chat to train on.

A drafter for a reasoning program learns most from what the target writes in it. Trees of the problems that it
will be measured by are left out like any conversation with an evaluation prompt (`corpus.exclude`).
"""

from collections.abc import Iterator
from typing import Any

from drafttrain.utils.errors import UserError

SHORT = 16  # answers of at most so many tokens, such as scores, get no drafts (`scheduler.short`)


def answered_calls(trace: dict[str, Any], source: str) -> Iterator[dict[str, Any]]:
    """Yield the calls of a trace that have an answer, but for short ones, as rows of OpenAI messages.

    Answers have the token ids that were generated, up to the stop text and with it. Those that had to begin
    with given words are tokenized again, together with these words.

    Raises:
        UserError: damaged; the message begins with `source`.
    """
    try:
        for entry in trace["rounds"]:
            for call in entry["calls"]:
                if call["max_new_tokens"] > SHORT and call["error"] is None and call["token_ids"]:
                    yield _row(trace["problem"], call)
    except (KeyError, TypeError) as error:
        raise UserError(f"{source}: damaged trace ({error!r}); remove it, and make it again") from None


def _row(problem: dict[str, str], call: dict[str, Any]) -> dict[str, Any]:
    asked, begin = call["prompt"], call["begin"]
    chat = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    answer = {"role": "assistant", "content": begin + call["text"]}
    if not begin:
        answer["token_ids"] = call["token_ids"]
    path = ".".join(map(str, call["path"]))
    return {
        "id": f"{problem['id']}/{path}/{call['number']}",
        "messages": [*chat, answer],
        "finish_reason": call["finish_reason"],
        "tree_of": problem["text"],
    }
