"""What drafting and verifying cost, as far as a growth policy needs to know."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

FEW = 8  # draft tokens over which the cost of a token more is averaged


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
class AcceptanceCurve:
    """The share of drafted nodes of a joint probability that the target accepts, measured at some.

    Attributes:
        log_joint: natural logarithms of joint probabilities, ascending.
        accepted: share of nodes accepted at each, never falling.
    """

    log_joint: Sequence[float] = (-16.0, 0.0)
    accepted: Sequence[float] = (0.0, 1.0)

    @cached_property
    def _points(self) -> torch.Tensor:
        return torch.tensor([self.log_joint, self.accepted])  # [2, points]

    def __call__(self, log_joint: torch.Tensor) -> torch.Tensor:
        """Share accepted, on the straight line between the neighbours measured, of any shape; 0 for padding
        (-inf)."""
        x, y = self._points.to(log_joint.device)
        inside = log_joint.clamp(self.log_joint[0], self.log_joint[-1])
        right = torch.bucketize(inside, x).clamp(1, len(x) - 1)
        low, high = x[right - 1], x[right]
        share = y[right - 1] + (y[right] - y[right - 1]) * (inside - low) / (high - low)
        return share.masked_fill(log_joint == -torch.inf, 0.0)


@dataclass(frozen=True)
class Costs:
    """What a step costs on one machine with one target and one drafter.

    Attributes:
        draft: one drafting step, by the number of expanded nodes.
        verify: what a step takes besides, by the number of tokens verified, root included.
        target: the target's forward alone, by the number of tokens.
        rate: tokens per second that a step has to beat in `timed`.
        acceptance: accepted children of an accepted node, at each depth from 0 on.
        promise: what a node's joint probability is worth.
        beta: threshold of C2T that is expected to be the fastest; None where there was no classifier.
        expand: threshold of the nodes that C2T expands; None for all that it verifies.
        top_k: children of a node that these thresholds were found with.
    """

    draft: CostCurve
    verify: CostCurve
    target: CostCurve
    rate: float
    acceptance: tuple[float, ...]
    promise: AcceptanceCurve
    beta: float | None = None
    expand: float | None = None
    top_k: int | None = None

    def for_pct(self) -> dict[str, Any]:
        """s_d and s_t, both taken as constant (EDD paper, eq. 5)."""
        return {"draft_seconds": self.draft(1), "verify_seconds": self.target(1)}

    def for_timed(self) -> dict[str, Any]:
        return {
            "draft_seconds": self.draft,
            "verify_seconds": self.verify,
            "rate": self.rate,
            "acceptance": self.acceptance,
            "promise": self.promise,
        }

    def for_c2t(self) -> dict[str, Any]:
        """The thresholds for this machine, if they were looked for."""
        found = {"beta": self.beta, "expand": self.expand, "top_k": self.top_k}
        return {name: value for name, value in found.items() if value is not None}

    def worth(self, rate: float) -> tuple[float, float]:
        """Least confidence of a node that is worth verifying, and of one that is worth expanding.

        A second has to bring `rate` tokens. Verifying a node brings one with its confidence C and takes what
        a token more takes: C > rate · s_t'. Expanding it brings one with C · a, a the share of accepted nodes
        with an accepted child, and takes a layer and at least one token more: C · a > rate · (s_d + s_t').
        """
        token = (self.verify(1 + FEW) - self.verify(1)) / FEW  # seconds
        verify = rate * token
        expand = rate * (self.draft(1) + token) / self.acceptance[0]
        return min(max(verify, 0.005), 0.95), min(max(expand, 0.005), 0.95)


# the EDD paper's machine, to check what a policy takes where nothing is calibrated
EXAMPLE_COSTS = Costs(
    *[CostCurve((1,), (seconds,)) for seconds in (1.1e-3, 29.8e-3, 29.8e-3)], 60.0, (0.6,), AcceptanceCurve()
)
