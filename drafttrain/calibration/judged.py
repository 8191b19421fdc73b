"""Decode prompts and record which drafts the target accepts, by the drafter's confidence."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from drafttrain.calibration.calibration import Calibration, Reliability, non_decreasing
from drafttrain.calibration.confidence import TEMPERATURES, best_temperature, reliability
from drafttrain.inference.acceptance import AcceptanceRule, Accepted, accept_greedy
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import TreeProposer
from drafttrain.inference.stats import DecodeStats
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.costs import AcceptanceCurve, Costs
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.eagle2 import Eagle2Policy
from drafttrain.trees.interface import TreePolicy
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError

# bounds of the bins of joint probability, in thousandths, over which acceptance in trees is averaged
PER_MILLE = (1, 2, 5, 10, 20, 30, 50, 70, 100, 150, 200, 300, 400, 500, 600, 700, 800, 900)
LEAST = -9.0  # natural logarithm of a joint probability; lower ones count as this one


@dataclass
class Decoding:
    """Decodes all prompts one by one with a policy.

    Attributes:
        prompts: token ids of each.
        on_prompt: called after each prompt.
    """

    target: FrozenTarget
    drafter: Drafter
    prompts: Sequence[list[int]]
    max_new_tokens: int
    on_prompt: Callable[[], None]

    def run(
        self,
        policy: TreePolicy,
        accept: AcceptanceRule = accept_greedy,
        before_prompt: Callable[[], None] = lambda: None,
    ) -> DecodeStats:
        """Decode all prompts; return the statistics of all together."""
        total = DecodeStats()
        proposer = TreeProposer(self.drafter, policy)
        for prompt in self.prompts:
            before_prompt()
            total += decode_all(self.target, proposer, [prompt], self.max_new_tokens, accept=accept)[1]
            self.on_prompt()
        return total


@dataclass
class Judged:
    """A drafted token whose parents were accepted.

    Attributes:
        prompt: number of its prompt.
        depth: position in its chain, from 1.
        confidence: the drafter's probability at each of `TEMPERATURES`.
        accepted: whether the target accepted it.
    """

    prompt: int
    depth: int
    confidence: list[float]
    accepted: bool


class JudgedChains(TreePolicy, AcceptanceRule):
    """Growth policy of chains that is also the acceptance rule of their decoding and records which tokens it
    accepts (batch 1, greedy).

    Args:
        length: tokens of the chains.
        stop: tokens after which the rest of a chain is not recorded.
    """

    def __init__(self, length: int, stop: Collection[int]):
        self.max_depth, self.stop = length, frozenset(stop)
        self._prompt = -1
        self.judged: list[Judged] = []
        self._confidence: list[list[float]] = []

    def grow(self, drafter: Drafter, state: object, root: torch.Tensor) -> TokenTree:
        """Draft a chain after the root token [1]."""
        tree = TokenTree.root_only(root)
        temperatures = torch.tensor(TEMPERATURES, device=root.device)[:, None]  # [t, 1]
        self._confidence = []
        for depth in range(self.max_depth):
            last = torch.full_like(root, depth)[:, None]  # [1, 1]
            log_probs = drafter.expand(state, tree, last)  # [1, 1, D]
            scaled = (log_probs[0] / temperatures).log_softmax(-1)  # [t, D]
            best, ids = log_probs.max(-1)  # [1, 1]
            self._confidence.append(scaled[:, ids[0, 0]].exp().tolist())
            tree = tree.append(last, drafter.to_target(ids), best)
        return tree

    def __call__(self, tree: TokenTree, logits: torch.Tensor) -> Accepted:
        accepted = accept_greedy(tree, logits)
        count = int(accepted.counts[0]) - 1
        tokens = tree.tokens[0].tolist()
        for i in range(min(count + 1, tree.width - 1)):
            self.judged.append(Judged(self._prompt, i + 1, self._confidence[i], i < count))
            if tokens[i + 1] in self.stop:
                break
        return accepted

    def set_active(self, seeds: Sequence[int], positions: Sequence[int] = ()) -> None:
        """Do nothing, as policy and as rule: one prompt is decoded at a time."""

    def next_prompt(self) -> None:
        """Start the next prompt."""
        self._prompt += 1


@dataclass
class PredictedPolicy(TreePolicy):
    """Growth policy that wraps another one and adds up the cost of its steps by the measured curves. What
    these do not cover (C2T's entropies and classifier, an eighth of drafting) is left out. The wrapped policy
    gets this object as its drafter, so that its expansions are counted.

    Attributes:
        seconds: predicted seconds of all steps so far, for one sequence.
    """

    policy: TreePolicy
    costs: Costs
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.max_depth = self.policy.max_depth

    def grow(self, drafter: Drafter, state: object, root: torch.Tensor) -> TokenTree:
        """Draft trees after root tokens [B]."""
        self.draft_vocab_size, self.to_target = drafter.draft_vocab_size, drafter.to_target
        self._top, self._expand = drafter.top, drafter.expand
        tree = self.policy.grow(self, state, root)
        self.seconds += self.costs.verify(tree.width)
        return tree

    def expand(self, state: object, tree: TokenTree, frontier: torch.Tensor) -> torch.Tensor:
        self.seconds += self.costs.draft(frontier.shape[1])
        return self._expand(state, tree, frontier)

    def top(
        self, state: object, tree: TokenTree, frontier: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.seconds += self.costs.draft(frontier.shape[1])
        return self._top(state, tree, frontier, k)


class JudgedTrees(AcceptanceRule):
    """Acceptance rule (batch 1, greedy) that records the joint probability and acceptance of nodes.

    Attributes:
        log_joint, accepted: of the nodes of each tree without its root, fp32 and bool [n - 1].
    """

    def __init__(self) -> None:
        self.log_joint: list[torch.Tensor] = []
        self.accepted: list[torch.Tensor] = []

    def __call__(self, tree: TokenTree, logits: torch.Tensor) -> Accepted:
        accepted = accept_greedy(tree, logits)
        on_path = torch.zeros(tree.width, dtype=torch.bool)  # [n]
        on_path[accepted.path[0, : int(accepted.counts[0])].cpu()] = True
        self.log_joint.append(tree.joint_log_probs()[0, 1:].cpu())  # [n - 1]
        self.accepted.append(on_path[1:])
        return accepted

    def promise(self) -> AcceptanceCurve:
        """Return the share of nodes accepted by joint probability: means of bins, by isotonic regression."""
        log_joint = torch.cat(self.log_joint).clamp(min=LEAST)  # [nodes]
        accepted = torch.cat(self.accepted).float()  # [nodes]
        which = torch.bucketize(log_joint, (torch.tensor(PER_MILLE) / 1000).log())  # [nodes]
        counts = torch.bincount(which, minlength=len(PER_MILLE) + 1)  # [bins]
        sums = [torch.bincount(which, weights=x, minlength=len(counts)) for x in (log_joint, accepted)]
        places, shares = ((x[counts > 0] / counts[counts > 0]).tolist() for x in sums)
        shares = non_decreasing(shares, counts[counts > 0].tolist())
        # with end points for joint probabilities of 0 and 1, as the curve is interpolated
        return AcceptanceCurve((LEAST - 1, *places, 1e-6), (0.0, *shares, max(shares[-1], 1 - 1e-6)))


def judge(judged: Sequence[Judged]) -> tuple[float, dict[str, dict[str, Reliability]]]:
    """Return the best temperature of all tokens, and the reliability of confidence, raw and scaled, by depth.

    "scaled" uses for each half of the prompts the best temperature of the other half.

    Raises:
        UserError: no tokens in one half.
    """
    even = np.array([item.prompt % 2 == 0 for item in judged], dtype=bool)  # [tokens]
    if even.all() or not even.any():
        raise UserError(
            f"calibrate: must have drafts of two prompts or more, got {len(judged)} drafted tokens of "
            f"{len({item.prompt for item in judged})}; give more prompts or more new tokens"
        )
    confidence = np.array([item.confidence for item in judged])  # [tokens, temperatures]
    accepted = np.array([item.accepted for item in judged])  # [tokens]
    depth = np.array([item.depth for item in judged])
    at_one = confidence[:, TEMPERATURES.index(1.0)]  # [tokens]
    scaled = at_one.copy()
    for half in (even, ~even):
        temperature = best_temperature(confidence[half], accepted[half])
        scaled[~half] = confidence[~half, TEMPERATURES.index(temperature)]
    rows: dict[str, dict[str, Reliability]] = {}
    for kind, c in (("raw", at_one), ("scaled", scaled)):
        rows[kind] = {"all": reliability(c, accepted)}
        for d in range(1, int(depth.max()) + 1):
            here = depth == d
            if here.any():
                rows[kind][str(d)] = reliability(c[here], accepted[here])
    return best_temperature(confidence, accepted), rows


def drafter_facts(chains: JudgedChains, trees: JudgedTrees, stats: DecodeStats, tree: str) -> dict[str, Any]:
    """Return the part of a calibration that does not depend on the machine.

    Args:
        stats: statistics of decoding with `trees`.
        tree: name of the policy that grew them.
    """
    temperature, confidence = judge(chains.judged)
    return {
        # at least 0.01: with a share of 0 (nothing accepted, or the depth not reached) no policy would draft
        # there again
        "acceptance": [max(0.01, share) for share in stats.acceptance_by_depth] or [0.01],
        "promise": trees.promise(),
        "tree": tree,
        "temperature": temperature,
        "confidence": confidence,
    }


def steps_rate(stats: DecodeStats) -> float:
    """Return the tokens per second of steps, without prefill."""
    return (stats.new_tokens - stats.prompts) / max(stats.seconds - stats.prefill_seconds, 1e-9)


def step_overhead(found: Calibration, stats: DecodeStats, policy: Eagle2Policy) -> float:
    """Return the seconds of a step that neither the target's nor the drafter's curve accounts for."""
    costs, nodes = found.costs, stats.verify_tokens / stats.steps
    # all layers are expanded, also where their nodes were not kept
    drafting = costs.draft(1) + max(0, policy.max_depth - 1) * costs.draft(policy.top_k)
    step = (stats.seconds - stats.prefill_seconds) / stats.steps
    return max(0.0, step - drafting - costs.target(nodes + 1))
