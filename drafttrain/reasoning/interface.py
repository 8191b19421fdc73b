"""Calls to a language model and their answers: all that trees of thoughts need of a decoder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from drafttrain.data.message import Message
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.stats import DecodeStats


@dataclass(frozen=True)
class Call:
    """One request for text.

    Attributes:
        messages: the chat up to the answer; a plain string is a chat of one user turn.
        max_new_tokens: token limit of the answer.
        sampling: with a seed that belongs to this call alone.
        stop: the answer ends before the first of these texts.
        begin: text that the model's turn begins with; the answer is its continuation.
        evaluates: whether the state evaluator makes the call, rather than the thought generator.
    """

    messages: str | Sequence[Message]
    max_new_tokens: int
    sampling: SamplingParams
    stop: tuple[str, ...] = ()
    begin: str = ""
    evaluates: bool = False


@dataclass(frozen=True)
class Answer:
    """Text generated for a call.

    Attributes:
        text: the generated text up to the stop text, without it.
        token_ids: as generated.
        finish_reason: as in decoding: "stop", "length", "not_finite"; empty after an error.
        error: why there is no usable text; None if there is.
        stats: of its decoding. The only times are `seconds` and `prefill_seconds`: its share of the forwards
            that it took part in (with overlap, of target forwards and of waits for drafts; work beside a
            forward takes none).
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "stop"
    error: str | None = None
    stats: DecodeStats = field(default_factory=DecodeStats, compare=False)


# Takes a call's number (calls are counted in the order in which they were made) and its answer, and returns
# the calls that can be made now.
Then = Callable[[int, Answer], Sequence[Call]]
# Answers calls, and the calls that `Then` returns for their answers, until none are left. Calls that wait at
# the same time do not depend on each other and may overlap. A failed call has its error in its answer; an
# exception ends the search.
Generate = Callable[[Sequence[Call], Then], Any]


def in_rounds(answer: Callable[[Sequence[Call]], Sequence[Answer]]) -> Generate:
    """Return a `Generate` made from a function that answers a list of calls: all waiting calls form a round,
    and the next round begins when each of them has its answer."""

    def generate(calls: Sequence[Call], then: Then) -> None:
        first, waiting = 0, list(calls)
        while waiting:
            numbered = list(zip(range(first, first + len(waiting)), answer(waiting), strict=True))
            first += len(waiting)
            waiting = [call for number, one in numbered for call in then(number, one)]

    return generate
