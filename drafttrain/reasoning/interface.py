"""Calls of a language model and its answers: all that trees of thoughts need of a decoder."""

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
        messages: the chat up to the answer; a text is a chat of one user turn.
        max_new_tokens: limit of the answer.
        sampling: with a seed that belongs to this call alone.
        stop: the answer ends before the first of these texts.
        begin: what the model's turn begins with; the answer is what follows.
        evaluates: whether the state evaluator asks, not the thought generator.
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
        text: up to the stop text, without it.
        token_ids: as generated.
        finish_reason: as in decoding: "stop", "length", "not_finite"; empty after an error.
        error: why there is no usable text; None: there is.
        stats: of its decoding; of times only `seconds` and `prefill_seconds`, its share of the forwards that
            it took part in (where drafting overlaps with verifying, of the target's and of waits for drafts).
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "stop"
    error: str | None = None
    stats: DecodeStats = field(default_factory=DecodeStats, compare=False)


# Takes the answer of a call, which is named by its number among all calls in the order in which they were
# made, and returns the calls that can be made now.
Then = Callable[[int, Answer], Sequence[Call]]
# Answers calls and those that follow from their answers, until there are none. Calls that wait at the same
# time do not depend on each other and may overlap. A call that fails has its error in its answer; an
# exception ends the search.
Generate = Callable[[Sequence[Call], Then], Any]


def in_rounds(answer: Callable[[Sequence[Call]], Sequence[Answer]]) -> Generate:
    """Make what a search needs of a function that answers a list of calls: all calls that wait are one round,
    and the next begins when each has its answer."""

    def generate(calls: Sequence[Call], then: Then) -> None:
        first, waiting = 0, list(calls)
        while waiting:
            numbered = list(zip(range(first, first + len(waiting)), answer(waiting), strict=True))
            first += len(waiting)
            waiting = [call for number, one in numbered for call in then(number, one)]

    return generate
