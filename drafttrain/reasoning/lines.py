"""Lines of calls: the prompts of a tree's node in order, each sent after the answer to the previous one.

A search is a generator that yields the lines of a round and resumes when all of them have ended. Lines of a
round do not depend on each other: one may be at its last call while another still waits for its first
answer.
"""

import hashlib
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from drafttrain.inference.params import SamplingParams
from drafttrain.reasoning.interface import Call
from drafttrain.reasoning.tasks.task import Ask, Asking

T = TypeVar("T")
NodePath = tuple[int, ...]  # child index at each level from the root on; () for the root


class CallFailed(Exception):
    """Raised inside a line whose call has failed, with the reason."""


@dataclass(eq=False)
class Line:
    """A chain of dependent calls of a node: each is made after the answer to the previous one.

    Attributes:
        path: of the node.
        asking: generator that yields prompts and is sent the texts of their answers.
        result: the generator's return value, or the `CallFailed` that it did not handle.
    """

    path: NodePath
    asking: Asking[Any]
    result: Any = None

    def begin(self) -> Ask | None:
        """Return the first prompt, None if there is none."""
        return self._resume(self.asking.__next__)

    def go_on(self, text: str) -> Ask | None:
        """Send an answer to the generator; return the next prompt, None if the line has ended."""
        return self._resume(self.asking.send, text)

    def fail(self, reason: str) -> Ask | None:
        """Throw a failure in place of an answer; return the next prompt, None if the line has ended."""
        return self._resume(self.asking.throw, CallFailed(reason))

    def _resume(self, step: Any, *given: Any) -> Ask | None:
        try:
            return step(*given)
        except StopIteration as end:
            self.result = end.value
        except CallFailed as failed:
            self.result = failed
        return None


# Type of a search: a generator that yields the lines of each round and returns its result.
Rounds = Generator[Sequence[Line], None, T]


@dataclass(frozen=True)
class Numbered:
    """A call, the node that it belongs to and its number among that node's calls."""

    path: NodePath
    number: int
    call: Call


@dataclass
class Caller:
    """Factory of a tree's calls: it adds seeds and limits to prompts.

    Attributes:
        sampling: of all calls, apart from their seeds.
        max_new_tokens: upper limit of every answer; None: only the limit of its prompt.
        seed: of the tree.
        numbers: number of calls that each node has made.
    """

    sampling: SamplingParams
    max_new_tokens: int | None
    seed: int
    numbers: Counter[NodePath] = field(default_factory=Counter)

    def call(self, path: NodePath, ask: Ask) -> Numbered:
        """Return a prompt as the next call of a node."""
        number, self.numbers[path] = self.numbers[path], self.numbers[path] + 1
        limit = min(ask.max_new_tokens, self.max_new_tokens or ask.max_new_tokens)
        sampling = replace(self.sampling, seed=call_seed(self.seed, path, number))
        call = Call(ask.prompt, limit, sampling, ask.stop, ask.begin, ask.evaluates)
        return Numbered(path, number, call)


def call_seed(seed: int, path: NodePath, number: int) -> int:
    """Return the 48-bit seed of a node's call: a hash of the tree's seed, the path and the call's number."""
    text = f"{seed}:{'.'.join(map(str, path))}:{number}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")
