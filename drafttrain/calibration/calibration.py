"""`calibration.json`: what drafting and verifying cost on one machine, and what confidence is worth."""

import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from drafttrain.kernels.machine import describe_machine, machine_difference
from drafttrain.trees.costs import AcceptanceCurve, CostCurve, Costs
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json
from drafttrain.utils.machine import dtype_name
from drafttrain.utils.quantiles import quartiles

FILE = "calibration.json"
FORMAT_VERSION = 1
BINS = 10  # of confidence, of equal width
CONTEXT = 256  # tokens; whose curves the policies use


@dataclass
class Reliability:
    """Confidence against acceptance over some judged tokens.

    Attributes:
        tokens: how many were judged.
        accepted: share of them that was accepted.
        confidence: mean confidence.
        ece: expected calibration error: mean distance of confidence and acceptance over ten bins of equal
            width, weighted by tokens.
        auroc: chance that an accepted token has more confidence than a rejected one; None if there are only
            tokens of one kind.
        brier: mean squared distance of confidence and outcome.
        bins: for each bin [tokens, mean confidence, share accepted]; None in an empty one.
    """

    tokens: int
    accepted: float
    confidence: float
    ece: float
    auroc: float | None
    brier: float
    bins: list[list[float | None]]


@dataclass
class Curve:
    """Seconds by size at one length of context.

    Attributes:
        context: committed tokens.
        sizes: tokens or nodes, ascending.
        lower, median, upper: quartiles of the seconds at each size.
    """

    context: int
    sizes: list[int]
    lower: list[float]
    median: list[float]
    upper: list[float]

    @classmethod
    def of(cls, context: int, seconds: dict[int, list[float]]) -> "Curve":
        """From all measurements at each size."""
        sizes = sorted(seconds)
        lower, median, upper = zip(*(quartiles(seconds[size]) for size in sizes))
        return cls(context, sizes, list(lower), list(median), list(upper))

    def cost(self) -> CostCurve:
        """The medians, evened out where they fall: more tokens do not take less time, so that is noise."""
        return CostCurve(tuple(self.sizes), tuple(non_decreasing(self.median)))


@dataclass
class Calibration:
    """What was measured on one machine.

    Attributes:
        machine: as `describe_machine` has it, with the `load` meanwhile.
        dtype: of target and drafter.
        versions: of the libraries.
        measured: when.
        made_for: fingerprints of "target" and "drafter", and of the "classifier" that `beta` is for.
        target: s_t(n), seconds of the target's forward by tokens, for each context.
        drafter: s_d(f), seconds of a drafting step by expanded nodes, for each context.
        step_overhead: seconds of a step outside both.
        rate: tokens per second that a step has to beat in `timed`; of those tried, the one that was fastest.
        reached: tokens per second of `timed` with it on the prompts, their own forwards left out.
        acceptance: accepted children of an accepted node that was expanded, at each depth from 0 on.
        promise: share of nodes accepted, by joint log-probability.
        tree: policy that `acceptance`, `promise` and `step_overhead` were measured with.
        temperature: under which the drafter's confidence predicts acceptance best.
        beta: threshold of C2T with which the measured costs promise most tokens per second; None where the
            bundle had no classifier.
        expand: likewise of the nodes that it expands; None: all that it verifies.
        top_k: children of a node that both were found with.
        quick: whether this is a short calibration, whose `rate` and thresholds come from the curves and whose
            `reached` is predicted.
        confidence: "raw" and "scaled" (by the temperature of the other half of the prompts), each by depth
            ("all", "1", "2", …).
    """

    machine: dict[str, Any]
    dtype: str
    versions: dict[str, str]
    measured: str
    made_for: dict[str, str]
    target: list[Curve]
    drafter: list[Curve]
    step_overhead: float
    rate: float
    reached: float
    acceptance: list[float]
    promise: AcceptanceCurve
    tree: str
    temperature: float
    confidence: dict[str, dict[str, Reliability]]
    beta: float | None = None
    expand: float | None = None
    top_k: int | None = None
    quick: bool = False
    format_version: int = FORMAT_VERSION

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Calibration":
        """Read the file, or that of a folder.

        Raises:
            UserError: missing, damaged or of another format.
        """
        path = Path(path) / FILE if Path(path).is_dir() else Path(path)
        values = read_json(path)
        remedy = "measure it again with drafttrain calibrate"
        if not isinstance(values, dict) or values.get("format_version") != FORMAT_VERSION:
            raise UserError(f"{path}: no calibration of format {FORMAT_VERSION}; {remedy}")
        try:
            curves = {name: [Curve(**curve) for curve in values.pop(name)] for name in ("target", "drafter")}
            confidence = {
                kind: {depth: Reliability(**row) for depth, row in rows.items()}
                for kind, rows in values.pop("confidence").items()
            }
            promise = AcceptanceCurve(**{name: tuple(row) for name, row in values.pop("promise").items()})
            found = cls(**values, **curves, confidence=confidence, promise=promise)
            found.check()
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path}: damaged ({error}); {remedy}") from None
        return found

    def check(self) -> None:
        """Raises:
        ValueError, TypeError, AttributeError, KeyError: numbers that no measurement gives.
        """
        curves = self.target + self.drafter
        for curve in curves:
            lengths = {len(row) for row in (curve.sizes, curve.lower, curve.median, curve.upper)}
            if lengths != {len(curve.sizes)} or sorted(set(curve.sizes)) != curve.sizes:
                raise ValueError("a curve is incomplete")
        numbers = [number for curve in curves for number in (curve.context, *curve.median)]
        numbers += [self.rate, self.temperature, *self.acceptance]
        if not all(0 < number < math.inf for number in numbers) or not 0 <= self.step_overhead < math.inf:
            raise ValueError("a number is not positive")
        for threshold in (self.beta, self.expand):
            if threshold is not None and not 0 < threshold < 1:
                raise ValueError("beta or expand is no threshold")
        if not len(self.promise.log_joint) == len(self.promise.accepted) > 1:
            raise ValueError("promise is incomplete")
        if not (self.target and self.drafter and self.acceptance and max(self.acceptance) <= 1):
            raise ValueError("something is empty")
        if not isinstance(self.machine, dict) or not {"target", "drafter"} <= set(self.made_for):
            raise ValueError("what it is of is missing")

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def costs(self) -> Costs:
        """Return the costs that the growth policies use."""
        target, drafter = (
            min(curves, key=lambda curve: abs(curve.context - CONTEXT)).cost()
            for curves in (self.target, self.drafter)
        )
        step = CostCurve(target.sizes, tuple(seconds + self.step_overhead for seconds in target.seconds))
        thresholds = self.beta, self.expand, self.top_k
        return Costs(drafter, step, target, self.rate, tuple(self.acceptance), self.promise, *thresholds)

    def foreign(self, device: torch.device, dtype: torch.dtype, made_for: dict[str, str]) -> str | None:
        """Return in a few words what differs if it was measured on another machine, with other instructions
        or threads than these, in another dtype, or of another target or drafter; else None."""
        difference = machine_difference(self.machine, describe_machine(device))
        pairs = [("dtype", self.dtype, dtype_name(dtype))]
        pairs += [(name, self.made_for[name], made_for[name]) for name in ("target", "drafter")]
        for name, calibrated, found in pairs:
            if difference is None and calibrated != found:
                difference = f"{name} {calibrated}, and this is {found}"
        return difference and f"calibrated for {difference}"


def non_decreasing(values: Sequence[float]) -> list[float]:
    """Return the non-decreasing sequence closest to `values` in squared distance (isotonic regression by
    pooling neighbours that fall; scikit-learn's gives the same and takes a second to import)."""
    pools: list[tuple[float, int]] = []  # mean and number of values
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            other, n = pools.pop()
            mean, count = (mean * count + other * n) / (count + n), count + n
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]
