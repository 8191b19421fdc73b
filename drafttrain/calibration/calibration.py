"""`calibration.json`: costs of drafting and verifying on one machine, and the reliability of confidence."""

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from drafttrain.kernels.build import sources_hash
from drafttrain.kernels.difference import machine_difference
from drafttrain.kernels.machine import describe_machine, dtype_name
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.costs import AcceptanceCurve, CostCurve, Costs
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json, usable
from drafttrain.utils.provenance import versions
from drafttrain.utils.quantiles import quartiles
from drafttrain.utils.types import check_types

FILE = "calibration.json"
FORMAT_VERSION = 1
BINS = 10  # of confidence, of equal width
CONTEXT = 256  # tokens; policies use the curves of the context closest to it


@dataclass
class Reliability:
    """Confidence compared with acceptance over some drafted tokens whose parents were accepted.

    Attributes:
        tokens: their number.
        accepted: share of them that was accepted.
        confidence: mean confidence.
        ece: expected calibration error: mean distance of confidence and acceptance over ten bins of equal
            width, weighted by tokens.
        auroc: probability that an accepted token has more confidence than a rejected one; None if all or
            none were accepted.
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
        """Return the quartiles of all measurements at each size."""
        sizes = sorted(seconds)
        quarters = [quartiles(seconds[size]) for size in sizes]
        return cls(context, sizes, *([quarter[i] for quarter in quarters] for i in range(3)))

    def cost(self) -> CostCurve:
        """Return the medians as a non-decreasing curve: more tokens do not take less time."""
        return CostCurve(tuple(self.sizes), tuple(non_decreasing(self.median)))


@dataclass
class Calibration:
    """Measurements on one machine.

    Attributes:
        machine: from `describe_machine`, with the `load` during the measurement.
        dtype: of target and drafter.
        versions: of the libraries, and the hash of the "kernels".
        measured: time of the measurement.
        made_for: fingerprints of "target" and "drafter", and of the "classifier" that `beta` is for.
        target: s_t(n), seconds of the target's forward by tokens, for each context.
        drafter: s_d(f), seconds of a drafting step by expanded nodes, for each context.
        growth: seconds of a layer of a tree that grows in one native call, likewise; None where the drafter
            has no such growth, or in older files.
        step_overhead: seconds of a step spent neither in the target's forward nor in drafting steps.
        rate: tokens per second that a step has to beat in `timed`; the fastest of those tried.
        reached: tokens per second of `timed` with it on the prompts, without prefill.
        acceptance: accepted children of an accepted node that was expanded, at each depth from 0 on.
        promise: share of nodes accepted, by joint log-probability.
        tree: policy that `acceptance`, `promise` and `step_overhead` were measured with.
        temperature: temperature at which the drafter's confidence predicts acceptance best.
        beta: threshold of C2T with the most tokens per second by the measured costs; None without a
            classifier.
        expand: threshold of the nodes that C2T expands, likewise; None: it expands all that it verifies.
        top_k: children of a node with which both thresholds were found.
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
    growth: list[Curve] | None = None
    quick: bool = False
    format_version: int = FORMAT_VERSION

    @classmethod
    def of(
        cls,
        target: FrozenTarget,
        fingerprints: Mapping[str, str],
        curves: tuple[list[Curve], list[Curve], list[Curve] | None],
        **rest: Any,
    ) -> "Calibration":
        """Return a new calibration for this machine, with the current time and no step overhead yet.

        Args:
            fingerprints: of "target" and "drafter".
            curves: of the target, of the drafter, and of native growth.
            rest: the other attributes without a default.
        """
        return cls(
            machine=machine_of(target),
            dtype=dtype_name(target.dtype),
            versions=versions() | {"kernels": sources_hash()},
            measured=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            made_for=dict(fingerprints),
            target=curves[0],
            drafter=curves[1],
            growth=curves[2],
            step_overhead=0.0,
            **rest,
        )

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Calibration":
        """Load a calibration from its file or from the folder with it.

        Raises:
            UserError: missing, damaged or of another format.
        """
        path = Path(path) / FILE if Path(path).is_dir() else Path(path)
        values = read_json(path)
        remedy = "measure it again with drafttrain calibrate"
        if not isinstance(values, dict) or values.get("format_version") != FORMAT_VERSION:
            raise UserError(f"{path}: no calibration of format {FORMAT_VERSION}; {remedy}")
        with usable(path, remedy):
            read = {name: values.pop(name) for name in ("target", "drafter")}
            read["growth"] = values.pop("growth", None)
            curves = {name: found and [Curve(**curve) for curve in found] for name, found in read.items()}
            confidence = {
                kind: {depth: Reliability(**row) for depth, row in rows.items()}
                for kind, rows in values.pop("confidence").items()
            }
            promise = AcceptanceCurve(**{name: tuple(row) for name, row in values.pop("promise").items()})
            found = cls(**values, **curves, confidence=confidence, promise=promise)
            found.check()
        return found

    def check(self) -> None:
        """Validate the values of a loaded file.

        Raises:
            ValueError, TypeError, AttributeError, KeyError: a value that no measurement gives.
        """
        curves = self.target + self.drafter + (self.growth or [])
        judged = [row for rows in self.confidence.values() for row in rows.values()]
        for part in (*curves, *judged):
            check_types(part)
        depths = {"all", *self.confidence["raw"]}
        if any(rows.keys() != depths for rows in self.confidence.values()) or any(
            len(one) != 3 or (one[0] and None in one) for row in judged for one in row.bins
        ):
            raise ValueError("confidence is incomplete")
        if not all(depth.isdecimal() for depth in depths - {"all"}):
            raise ValueError("a depth is no number")
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
        x, y = self.promise.log_joint, self.promise.accepted
        if not len(x) == len(y) > 1:
            raise ValueError("promise is incomplete")
        if not all(-math.inf < a < b < math.inf for a, b in pairwise(x)) or list(y) != sorted(y):
            raise ValueError("promise is not monotone")
        if not 0 <= y[0] <= y[-1] <= 1 or not all(type(n) is int and n > 0 for c in curves for n in c.sizes):
            raise ValueError("a share or size is out of range")
        if not (self.target and self.drafter and self.acceptance and max(self.acceptance) <= 1):
            raise ValueError("something is empty")
        if not isinstance(self.machine, dict) or not {"target", "drafter"} <= set(self.made_for):
            raise ValueError("machine or made_for is incomplete")

    def to_json(self) -> dict[str, Any]:
        """Return the content of its file, for `load`."""
        return asdict(self)

    @property
    def costs(self) -> Costs:
        """Return the costs that the growth policies use, from the curves closest to `CONTEXT`."""
        target, layer, draft = (
            min(curves, key=lambda curve: abs(curve.context - CONTEXT)).cost()
            for curves in (self.target, self.drafter, self.growth or self.drafter)
        )
        step = CostCurve(target.sizes, tuple(seconds + self.step_overhead for seconds in target.seconds))
        accepted = tuple(self.acceptance), self.promise
        return Costs(draft, step, target, self.rate, *accepted, self.beta, self.expand, self.top_k, layer)

    def foreign(self, target: FrozenTarget, made_for: dict[str, str]) -> str | None:
        """Return what differs, in one line, if it was measured on another machine, with other instructions or
        threads, in another dtype, with other kernels, or for another target or drafter; else None."""
        difference = machine_difference(self.machine, machine_of(target))
        pairs = [("dtype", self.dtype, dtype_name(target.dtype))]
        pairs += [(name, self.made_for[name], made_for[name]) for name in ("target", "drafter")]
        for name, calibrated, found in pairs:
            if difference is None and calibrated != found:
                difference = f"{name} {calibrated}, and this is {found}"
        if difference is None and target.is_packed and self.versions.get("kernels") != sources_hash():
            difference = "another version of the kernels"
        return difference and f"calibrated for {difference}"


def machine_of(target: FrozenTarget) -> dict[str, str | int | None]:
    """Describe this machine as a target uses it: a model that a program has loaded keeps its own forward."""
    return describe_machine(target.device, target.dtype, target.is_packed or target.device.type != "cpu")


def non_decreasing(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """Return the non-decreasing sequence closest to `values` in weighted squared distance by pooling adjacent
    violators (scikit-learn's isotonic regression takes a second to import)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight and number of values
    for value, weight in zip(values, weights or [1.0] * len(values)):
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            other, heft, n = pools.pop()
            mean = (mean * weight + other * heft) / (weight + heft)
            weight, count = weight + heft, count + n
        pools.append((mean, weight, count))
    return [mean for mean, _, count in pools for _ in range(count)]
