"""What drafting and verifying cost, as far as a growth policy needs to know."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a forward by its number of tokens, measured at some sizes.

    Attributes:
        sizes: tokens, ascending.
        seconds: at each size.
    """

    sizes: Sequence[int]
    seconds: Sequence[float]

    def __call__(self, n: float) -> float:
        """Seconds for n tokens, on the straight line between the neighbours measured; beyond the largest size
        in proportion to it, below the smallest as there."""
        if n <= self.sizes[0]:
            return self.seconds[0]
        if n >= self.sizes[-1]:
            return self.seconds[-1] * n / self.sizes[-1]
        right = bisect_left(self.sizes, n)
        (a, b), (low, high) = self.sizes[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return low + (high - low) * (n - a) / (b - a)


@dataclass(frozen=True)
class Costs:
    """What a step costs on one machine with one target and one drafter.

    Attributes:
        draft: one drafting step, by the number of expanded nodes.
        verify: what a step takes besides, by the number of tokens verified, root included.
        target: the target's forward alone, by the number of tokens.
        rate: tokens per second that `timed` reached when it was calibrated.
        acceptance: accepted children of an accepted node, at each depth from 0 on.
        temperature: under which the drafter's confidence predicts acceptance.
    """

    draft: CostCurve
    verify: CostCurve
    target: CostCurve
    rate: float
    acceptance: tuple[float, ...]
    temperature: float = 1.0

    def for_pct(self) -> dict[str, Any]:
        """s_d and s_t, both taken as constant (EDD paper, eq. 6)."""
        return {"draft_seconds": self.draft(1), "verify_seconds": self.target(1)}

    def for_timed(self) -> dict[str, Any]:
        return {
            "draft_seconds": self.draft,
            "verify_seconds": self.verify,
            "rate": self.rate,
            "acceptance": self.acceptance,
            "temperature": self.temperature,
        }
