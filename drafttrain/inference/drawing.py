"""Base class of acceptance rules that draw tokens at random."""

from collections.abc import Sequence

from drafttrain.inference.acceptance import AcceptanceRule
from drafttrain.inference.params import SamplingParams


class SamplingRule(AcceptanceRule):
    """Acceptance rule that draws tokens, and counts the emitted ones of each prompt.

    Args:
        params: sampling parameters of each prompt; `add` takes those of further prompts.
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
        """Set the prompts that the next trees belong to, each once, as draws are counted by prompt."""
        self.numbers = require_different(numbers)


def require_different(numbers: Sequence[int]) -> list[int]:
    """Return numbers as a list; all must differ.

    Raises:
        ValueError: one occurs twice.
    """
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"numbers: must differ, got {list(numbers)}; give forked rows numbers of their own")
    return list(numbers)
