"""`timed`: the tree that emits most tokens per second on this machine, by measured costs.

PCT expands a node if its confidence exceeds s_d / s_t (EDD paper, eq. 5): one drafting step against one
verification, both constant and independent of other nodes. Here the costs are curves, drafting time by
frontier width and verification time by tokens, and the value of a second is the rate at which this decoder
emits tokens anyway: by the renewal-reward theorem, decoding is fastest if every step takes the tree with the
greatest `expected tokens - rate * seconds`, where `rate` is the best attainable one. Trees that are best for
one rate reach a higher one, up to the best (Dinkelbach's method for ratios), so the rate follows what
decoding reaches: on this text, and in these minutes of the machine.
"""

import math
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np
import torch

from drafttrain.kernels.growth import Timing, grow_timed
from drafttrain.trees.costs import AcceptanceCurve, CostCurve, Costs
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.expand import add_children
from drafttrain.trees.interface import DEEPEST, LARGEST, WIDEST, TreePolicy
from drafttrain.trees.native import grow_natively
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.ranges import setting

SMALL = 4  # tokens of a small tree
MEMORY = 32  # steps over which the rate is averaged, later ones with more weight
PAUSE = 4.0  # steps count as at most this many usual ones: longer ones were interrupted


@dataclass
class TimedPolicy(TreePolicy):
    """Growth by costs: expand layer by layer the nodes whose children are expected to be worth the drafting
    time, then verify as many of the best nodes as are worth the verification time.

    Attributes:
        draft_seconds: time of expanding a layer, by the number of expanded nodes.
        verify_seconds: time of a step's verification, by the number of tokens, root included.
        rate: tokens that a second of drafting or verifying has to yield, for one sequence.
        acceptance: expected accepted children of an accepted node (at most one), at each depth from 0 on; the
            last value holds for deeper ones.
        promise: share of nodes accepted, by joint log-probability; None: the joint probability itself.
        width: children of an expanded node.
        frontier: expanded nodes of a layer at most.
        max_depth: layers at most.
        follow: tokens that a second has to yield, as a multiple of those of the last steps, starting from
            `rate`. 0: always `rate`, and so the same trees in each run.
    """

    draft_seconds: CostCurve
    verify_seconds: CostCurve
    rate: float = setting(gt=0)
    acceptance: tuple[float, ...] = setting((0.6,), gt=0, le=1)
    promise: AcceptanceCurve | None = None
    width: int = setting(4, ge=1, le=WIDEST)
    frontier: int = setting(8, ge=1, le=WIDEST)
    max_depth: int = setting(10, ge=0, le=DEEPEST)
    follow: float = setting(1.3, ge=0)  # the curves leave some costs out

    def __post_init__(self) -> None:
        super().__post_init__()
        step = self.verify_seconds(SMALL)  # starts as if MEMORY steps had reached `rate`
        self._seconds = MEMORY * step
        self._tokens = self._seconds * self.rate / (self.follow or 1.0)

    @classmethod
    def calibrated(cls, costs: Costs, given: Collection[str] = ()) -> dict[str, Any]:
        """Return the cost curves, the rate, and the acceptance by depth and by joint probability."""
        return {
            "draft_seconds": costs.draft,
            "verify_seconds": costs.verify,
            "rate": costs.rate,
            "acceptance": costs.acceptance,
            "promise": costs.promise,
        }

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_timing"}  # it holds addresses

    @cached_property
    def _timing(self) -> Timing:
        promise = ((), ()) if self.promise is None else (self.promise.log_joint, self.promise.accepted)
        curves = [(curve.sizes, curve.seconds) for curve in (self.draft_seconds, self.verify_seconds)]
        return Timing((*curves, promise), self.acceptance, self.width, self.frontier, self.max_depth)

    def grow(self, drafter: Drafter, state: object, root: torch.Tensor) -> TokenTree:
        """Draft trees after root tokens [B]; the sequences share forwards, and so the costs."""
        batch = len(root)
        if self.width <= drafter.draft_vocab_size:
            rate = self._rate(batch)
            grown = grow_natively(drafter, grow_timed, state, root, self._timing, rate)
            if grown is not None:
                return grown
        tree = TokenTree.root_only(root)
        # lists: for some dozens of nodes they are faster than operators of torch or numpy
        joint = [[1.0] for _ in range(batch)]  # of each row's nodes
        layer = 0  # first node of the deepest layer
        for depth in range(self.max_depth):
            most = min(self.frontier, (LARGEST - tree.width) // self.width)
            if most < 1:
                break
            best = [_descending(row, layer)[:most] for row in joint]  # [B, f]
            confidence = [_total(row[b] for row, b in zip(joint, nodes)) for nodes in zip(*best)]
            f = self._worth_expanding(confidence, depth, batch)
            if not f:
                break
            nodes = torch.tensor([sorted(row[:f]) for row in best])  # [B, f]
            nodes = nodes.to(root.device, non_blocking=True)
            layer = tree.width
            tree = add_children(drafter, state, tree, nodes, None, self.width)
            for row, more in zip(joint, self._accepted(tree.joint_log_probs()[:, layer:])):
                row += more
        return self._worth_verifying(tree, joint)

    def _accepted(self, joint: torch.Tensor) -> list[list[float]]:
        """Return the expected acceptance of nodes from their joint log-probabilities [B, m]."""
        log_probs = joint.numpy(force=True)
        if self.promise is not None:
            return np.nan_to_num(self.promise(log_probs), nan=0.0).tolist()
        # the exponential of native calls, which is monotone: else a child could come before its parent
        return [[0.0 if math.isnan(x) else math.exp(x) for x in row] for row in log_probs.tolist()]

    def _rate(self, batch: int) -> float:
        """Return the tokens per second that a batch of B sequences has to beat: B times those of one, divided
        by how many times as long verifying B trees takes."""
        rate = self.follow * self._tokens / self._seconds if self.follow else self.rate
        return rate * batch / self._slower(batch)

    def _slower(self, batch: int) -> float:
        """Return the time of verifying a batch relative to that of one sequence."""
        return self.verify_seconds(SMALL * batch) / self.verify_seconds(SMALL)

    def note_step(self, batch: int, tokens: int, seconds: float) -> None:
        """Update the tokens and seconds of the last steps, per sequence; older steps have less weight."""
        seconds /= self._slower(batch)
        seconds = min(seconds, PAUSE * self._seconds / MEMORY)
        self._tokens += tokens / batch - self._tokens / MEMORY
        self._seconds += seconds - self._seconds / MEMORY

    def _worth_expanding(self, confidence: list[float], depth: int, batch: int) -> int:
        """Return how many of the best nodes to expand to maximize the expected gain.

        Args:
            confidence: joint probability of each, best first, summed over the batch.
            depth: of these nodes.
        """
        rate = self._rate(batch)
        share, following = (self.acceptance[min(d, len(self.acceptance) - 1)] for d in (depth, depth + 1))
        # what the next layer may add: expanding the best of the new nodes, where that pays
        further = max(0.0, confidence[0] * share * following - rate * self.draft_seconds(1))
        best, best_gain, expected = 0, 0.0, further
        chain = self.verify_seconds(batch * (depth + 1))
        for f, p in enumerate(confidence, 1):
            # each expanded node adds at least one child to verify
            more = self.verify_seconds(batch * (f + depth + 1)) - chain
            expected += p * share
            gain = expected - rate * (self.draft_seconds(batch * f) + more)
            if gain > best_gain:
                best, best_gain = f, gain
        return best

    def size(self, joint: Sequence[Sequence[float]], beside: int = 0) -> int:
        """Return how many nodes of each tree are worth their time, root included.

        Args:
            joint: expected acceptance of the nodes of B trees, in descending order, the root's 1 first
                [B][n].
            beside: nodes of each tree that are verified in any case, not counted.
        """
        batch, n = len(joint), len(joint[0])
        rate, expected, best, size = self._rate(batch), 0.0, -math.inf, n
        for k in range(n):  # with one more node of each row than before
            expected += _total(row[k] for row in joint)
            gain = expected - rate * self.verify_seconds(batch * (k + 1 + beside))
            if gain > best:
                best, size = gain, k + 1
        return size

    def _worth_verifying(self, tree: TokenTree, joint: list[list[float]]) -> TokenTree:
        """Return the sub-tree of the best nodes, as many as maximize the expected gain; joint [B, n]."""
        ranked = [_descending(row) for row in joint]  # [B, n]; a parent is before its children
        size = self.size([[row[node] for node in nodes] for row, nodes in zip(joint, ranked)])
        if size == tree.width:
            return tree
        taken = torch.tensor([sorted(row[:size]) for row in ranked])  # [B, size]
        return tree.take(taken.to(tree.tokens.device, non_blocking=True))


def _total(values: Iterable[float]) -> float:
    """Add up values one by one, as native calls do: from Python 3.12 on `sum` compensates for rounding."""
    return reduce(operator.add, values, 0.0)


def _descending(values: list[float], first: int = 0) -> list[int]:
    """Return the indices of the values from `first` on, largest first; among equals the first comes first."""
    return sorted(range(first, len(values)), key=values.__getitem__, reverse=True)
