"""Calls of a language model and its answers: all that trees of thoughts need of a decoder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drafttrain.data.message import Message
from drafttrain.inference.params import SamplingParams


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
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str = "stop"
    error: str | None = None


# Answers the calls of one round, in their order. The calls do not depend on each other and may overlap. A
# call that fails has its error in its answer; an exception ends the search.
Generate = Callable[[Sequence[Call]], list[Answer]]
