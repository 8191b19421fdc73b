"""The base of acceptance rules that draw."""

from collections.abc import Sequence

from drafttrain.inference.acceptance import AcceptanceRule
from drafttrain.inference.params import SamplingParams


class SamplingRule(AcceptanceRule):
    """The base of rules that draw.

    Args:
        params: of each prompt; `add` takes those of further prompts.
    """

    def __init__(self, params: Sequence[SamplingParams] = ()):
        self.params = list(params)
        self.emitted = [0] * len(self.params)  # tokens of each prompt so far
        self.numbers: list[int] | None = None
        self.set_active(range(len(self.params)))

    def add(self, params: SamplingParams) -> None:
        self.params.append(params)
        self.emitted.append(0)

    def set_active(self, numbers: Sequence[int]) -> None:
        """Note which prompts the next trees are for, each named once: draws are counted by prompt."""
        self.numbers = require_different(numbers)


def require_different(numbers: Sequence[int]) -> list[int]:
    """Return numbers, all of them different, as a list.

    Raises:
        ValueError: one of them is named twice.
    """
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"numbers: must differ, got {list(numbers)}; give forked rows numbers of their own")
    return list(numbers)
