"""Costs of drafting and verifying, as growth policies use them."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

FEW = 8  # draft tokens over which the marginal cost of a token is averaged


@dataclass(frozen=True)
class CostCurve:
    """Seconds of a forward as a function of its number of tokens, measured at some sizes.

    Attributes:
        sizes: numbers of tokens, ascending.
        seconds: time at each size.
    """

    sizes: Sequence[int]
    seconds: Sequence[float]

    def __call__(self, n: float) -> float:
        """Return the seconds for n tokens: interpolated between measured sizes, proportional beyond the
        largest, constant below the smallest."""
        if n <= self.sizes[0]:
            return self.seconds[0]
        if n >= self.sizes[-1]:
            return self.seconds[-1] * n / self.sizes[-1]
        right = bisect_left(self.sizes, n)
        (a, b), (low, high) = self.sizes[right - 1 : right + 1], self.seconds[right - 1 : right + 1]
        return low + (high - low) * (n - a) / (b - a)


@dataclass(frozen=True)
class AcceptanceCurve:
    """Share of drafted nodes that the target accepts, by their joint probability.

    Attributes:
        log_joint: natural logarithms of joint probabilities, ascending.
        accepted: share accepted at each, non-decreasing.
    """

    log_joint: Sequence[float] = (-16.0, 0.0)
    accepted: Sequence[float] = (0.0, 1.0)

    @cached_property
    def _points(self) -> np.ndarray:
        return np.array([self.log_joint, self.accepted])  # [2, points]

    def __call__(self, log_joint: np.ndarray) -> np.ndarray:
        """Return the interpolated share, same shape."""
        return np.interp(log_joint, *self._points)


@dataclass(frozen=True)
class Costs:
    """Costs of a step on one machine with one target and one drafter.

    Attributes:
        draft: one drafting step, by the number of expanded nodes.
        verify: the rest of a step, by the number of tokens verified, root included.
        target: the target's forward alone, by the number of tokens.
        rate: tokens per second that a step has to beat in `timed`.
        acceptance: expected accepted children of an accepted node, at each depth from 0 on.
        promise: share of nodes accepted, by joint probability.
        beta: threshold of C2T that is expected to be the fastest; None without a classifier.
        expand: threshold of the nodes that C2T expands; None for all that it verifies.
        top_k: children per node for which these thresholds were tuned.
        layer: one drafting step of trees that grow layer by layer, if `draft` was measured in native growth;
            None: the same as `draft`.
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
    layer: CostCurve | None = None

    def worth(self, rate: float) -> tuple[float, float]:
        """Return the least confidence of a node worth verifying, and of one worth expanding.

        A second has to yield `rate` tokens. Verifying a node yields one with its confidence C and costs the
        marginal s_t' of a token: C > rate · s_t'. Expanding it yields one with C · a, a the share of accepted
        nodes with an accepted child, and costs a layer and at least one token: C · a > rate · (s_d + s_t').
        """
        token = (self.verify(1 + FEW) - self.verify(1)) / FEW  # seconds
        verify = rate * token
        expand = rate * ((self.layer or self.draft)(1) + token) / self.acceptance[0]
        return min(max(verify, 0.005), 0.95), min(max(expand, 0.005), 0.95)


# for checking policies without a calibration: no setting that a user gives can contradict these costs
EXAMPLE_COSTS = Costs(
    *[CostCurve((1,), (seconds,)) for seconds in (1e-12, 29.8e-3, 1e12)], 60.0, (0.6,), AcceptanceCurve()
)
