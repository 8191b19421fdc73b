"""Replay growth policies over recorded trees, without a model: what they would have drafted, how much of it
the target accepted, and the cost by measured curves."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafttrain.calibration.judged import JudgedTrees, PredictedPolicy
from drafttrain.inference.acceptance import Accepted
from drafttrain.trees.costs import Costs
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.interface import TreePolicy
from drafttrain.trees.timed import TimedPolicy
from drafttrain.trees.tree import TokenTree

STRICTNESS = (1.0, 1.2, 1.4, 1.7, 2.0)  # rates to beat that are tried, relative to the rate reached
CLOSE = 0.01  # relative difference of rates that is ignored


@dataclass(frozen=True)
class RecordedTree:
    """A drafted tree in breadth-first order, and what the target accepted of it.

    Attributes:
        parents: node above each node, int64 [n]; -1 for the root.
        log_probs: of each node given its parent, fp32 [n].
        accepted: bool [n]; True for the root.
    """

    parents: torch.Tensor
    log_probs: torch.Tensor
    accepted: torch.Tensor


class RecordedTrees(JudgedTrees):
    """Acceptance rule that also records the trees themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.trees: list[RecordedTree] = []

    def __call__(self, tree: TokenTree, logits: torch.Tensor) -> Accepted:
        accepted = super().__call__(tree, logits)
        if tree.width > 1:  # a prefill has no drafts
            taken = torch.cat([torch.ones(1, dtype=torch.bool), self.accepted[-1]])  # [n]
            self.trees.append(RecordedTree(tree.parents[0].cpu(), tree.log_probs[0].cpu(), taken))
        return accepted


class ReplayDrafter(Drafter):
    """Drafter that replays a recorded tree. Its tokens are the indices of that tree's nodes; beyond the tree
    all have probability 0."""

    def __init__(self, recorded: RecordedTree):
        n = self.draft_vocab_size = len(recorded.parents)
        self.children = torch.full((n, n), -torch.inf)  # [parent, child] log-probability
        self.children[recorded.parents[1:], torch.arange(1, n)] = recorded.log_probs[1:]

    def expand(self, state: object, tree: TokenTree, frontier: torch.Tensor) -> torch.Tensor:
        return self.children[tree.tokens.gather(1, frontier)]  # [1, f, n]

    def to_target(self, ids: torch.Tensor) -> torch.Tensor:
        return ids


def predicted_rate(trees: Sequence[RecordedTree], policy: TreePolicy, costs: Costs) -> float:
    """Predict the tokens per second of a policy from the recorded acceptance of its nodes and the measured
    costs of its trees."""
    predicted, tokens = PredictedPolicy(policy, costs), 0
    for recorded in trees:
        tree = predicted.grow(ReplayDrafter(recorded), None, torch.zeros(1, dtype=torch.int64))
        drafted = tree.joint_log_probs()[0] > -torch.inf  # [n]
        tokens += int((recorded.accepted[tree.tokens[0]] & drafted).sum())  # the root: the target's own token
    return tokens / predicted.seconds


def best_rate(trees: Sequence[RecordedTree], costs: Costs, width: int) -> tuple[float, float]:
    """Find the rate to beat with which `timed` is predicted to be fastest.

    The rate to beat is, in theory, the rate reached with it, found by iteration. Stricter ones are tried as
    well, and the strictest of those close to the best is taken: no curve includes the policy's own time, so
    small trees are faster than predicted.

    Args:
        costs: the search begins at their rate.
        width: children of an expanded node.

    Returns:
        that rate, and the tokens per second predicted with it.
    """

    def reached(rate: float) -> float:
        policy = TimedPolicy(**{**TimedPolicy.calibrated(costs), "rate": rate}, width=width)
        return predicted_rate(trees, policy, costs)

    rate, following = costs.rate, reached(costs.rate)
    while following > rate * (1 + CLOSE):  # from below it rises to the best one and no further
        rate, following = following, reached(following)
    tried = {strictness * following: reached(strictness * following) for strictness in STRICTNESS}
    rate = max(rate for rate in tried if tried[rate] >= (1 - CLOSE) * max(tried.values()))
    return rate, tried[rate]
