"""Rounds of calls: all prompts that wait for answers are asked in one round, each call with its own seed.

Functions here are generators that yield a round, a list of `Numbered`, and are sent its answers; their driver
decides where answers come from (a model, a trace) and may join the rounds of several trees.
"""

import hashlib
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from drafttrain.inference.params import SamplingParams
from drafttrain.reasoning.interface import Answer, Call
from drafttrain.reasoning.tasks.task import Asking

T = TypeVar("T")
Path = tuple[int, ...]  # of a node: the number of the child at each level, () for the root


@dataclass(frozen=True)
class Numbered:
    """A call, the node that it belongs to and its number among that node's calls."""

    path: Path
    number: int
    call: Call


Round = Generator[list[Numbered], Sequence[Answer], T]


@dataclass(frozen=True)
class Failed:
    """A result that is missing because one of its calls failed."""

    reason: str


@dataclass
class Caller:
    """Makes calls of asked prompts.

    Attributes:
        sampling: of all calls, each with its own seed.
        max_new_tokens: limit of every answer; None: only that of its prompt.
        seed: of the tree.
        numbers: calls that each node has had.
    """

    sampling: SamplingParams
    max_new_tokens: int | None
    seed: int
    numbers: Counter[Path] = field(default_factory=Counter)

    def ask(
        self, asked: Sequence[tuple[Path, Asking[T]]], evaluates: bool = False
    ) -> Round[list[T | Failed]]:
        """Run several generators of prompts side by side, each at the node that it is for.

        Args:
            evaluates: whether they are the state evaluator's.

        Returns:
            what each of them returns, or why one of its calls failed.
        """
        results: dict[int, Any] = {}
        waiting = {i: next(asking) for i, (_, asking) in enumerate(asked)}
        while waiting:
            calls = [self._call(asked[i][0], ask, evaluates) for i, ask in waiting.items()]
            answers = yield calls
            for i, answer in zip(list(waiting), answers, strict=True):
                if answer.error is not None:
                    results[i] = Failed(answer.error)
                    del waiting[i]
                    continue
                try:
                    waiting[i] = asked[i][1].send(answer.text)
                except StopIteration as end:
                    results[i] = end.value
                    del waiting[i]
        return [results[i] for i in range(len(asked))]

    def _call(self, path: Path, ask: Any, evaluates: bool) -> Numbered:
        number, self.numbers[path] = self.numbers[path], self.numbers[path] + 1
        limit = min(ask.max_new_tokens, self.max_new_tokens or ask.max_new_tokens)
        sampling = replace(self.sampling, seed=call_seed(self.seed, path, number))
        return Numbered(path, number, Call(ask.prompt, limit, sampling, ask.stop, ask.begin, evaluates))


def call_seed(seed: int, path: Path, number: int) -> int:
    """Return the seed (48 bits) of a node's call: from the tree's seed, the path and the call's number."""
    text = f"{seed}:{'.'.join(map(str, path))}:{number}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
