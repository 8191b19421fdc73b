"""N-gram candidates and a trained drafter's in one tree (`ngram+…`).

Where the caches' candidates are probable enough, they are verified alone, which saves the drafter's forwards.
Elsewhere the more probable ones are added to the drafter's tree, as children of any of its nodes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch

from drafttrain.inference.proposer import Proposer, TreeProposer
from drafttrain.self_draft.candidates import Candidates, Drafted, Features
from drafttrain.self_draft.proposer import SelfDraft
from drafttrain.trees.costs import AcceptanceCurve, Costs
from drafttrain.trees.lists import tree_of_lists
from drafttrain.trees.timed import TimedPolicy
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError

DRAFTER: Features = (("drafter", 0, 0),)


@dataclass
class HybridProposer(Proposer):
    """A drafter whose trees get the caches' candidates as further branches.

    Attributes:
        ngrams: the caches. They also learn the target's predictions after the drafter's nodes.
        drafter: the drafter with its growth policy.
        sure: the drafter is skipped if, in each sequence, the joint probabilities of the candidates of at
            least `least` add up to this.
        least: least joint probability of a candidate that is added to the drafter's tree.
        nodes: number of nodes verified, the most probable of both, root excluded. None: `timed` chooses it by
            its costs, and with another policy all nodes are verified.
        promise: share of the drafter's nodes accepted, by joint log-probability; None: the joint probability
            itself.
    """

    ngrams: SelfDraft
    drafter: TreeProposer
    sure: float = 2.0
    least: float = 0.2
    nodes: int | None = None
    promise: AcceptanceCurve | None = None

    def __post_init__(self) -> None:
        if self.drafter.draws:
            raise UserError(
                "tree: must be a deterministic one after ngram+, got drawn candidates; n-grams have no "
                "probabilities to draw from"
            )

    @property
    def model_seconds(self) -> float:
        return self.drafter.model_seconds

    def new_state(self, batch: int, max_len: int) -> tuple[list, Any]:
        return self.ngrams.new_state(batch, max_len), self.drafter.new_state(batch, max_len)

    def set_active(self, seeds: Sequence[int], positions: Sequence[int]) -> None:
        self.drafter.set_active(seeds, positions)

    def note_step(self, batch: int, tokens: int, seconds: float) -> None:
        self.drafter.note_step(batch, tokens, seconds)

    def twin(self) -> "HybridProposer":
        return replace(self, drafter=self.drafter.twin())

    def select_rows(self, state: tuple[list, Any], rows: torch.Tensor) -> tuple[list, Any]:
        return self.ngrams.select_rows(state[0], rows), self.drafter.select_rows(state[1], rows)

    def append_rows(self, state: tuple[list, Any], other: tuple[list, Any]) -> tuple[list, Any]:
        return self.ngrams.append_rows(state[0], other[0]), self.drafter.append_rows(state[1], other[1])

    def prefix(
        self, state: tuple[list, Any], length: int, room: int, tapped: torch.Tensor
    ) -> tuple[list, Any]:
        return (
            self.ngrams.prefix(state[0], length, room, tapped),
            self.drafter.prefix(state[1], length, room, tapped),
        )

    def join(self, states: Sequence[tuple[list, Any]]) -> tuple[list, Any]:
        lists, drafts = zip(*states)
        return self.ngrams.join(lists), self.drafter.join(drafts)

    def split(self, joined: tuple[list, Any], states: Sequence[tuple[list, Any]]) -> None:
        self.drafter.split(joined[1], [drafts for _, drafts in states])

    def learned(self, state: tuple[list, Any]) -> Any:
        return self.ngrams.learned(state[0])

    def share(self, state: tuple[list, Any], learned: Any) -> None:
        self.ngrams.share(state[0], learned)

    def update(
        self, state: tuple[list, Any], tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor
    ) -> None:
        self.drafter.update(state[1], tokens, tapped, counts)  # first: where it fails, neither has them
        self.ngrams.update(state[0], tokens, tapped, counts)

    def harvest(self, state: tuple[list, Any], tree: TokenTree, logits: torch.Tensor) -> None:
        self.ngrams.harvest(state[0], tree, logits)

    def propose(self, state: tuple[list, Any], root: torch.Tensor) -> TokenTree:
        sequences, drafter_state = state
        tokens, none = root.tolist(), [None] * len(root)
        followers = [cache(sequence.sources.followers) for sequence in sequences]

        def grown(drafted: Sequence[Drafted | None], least: float) -> Iterator[Candidates]:
            for sequence, token, tree, found in zip(sequences, tokens, drafted, followers):
                yield self.ngrams.candidates(sequence, token, tree, least, found)

        may_be_sure = self.sure <= self.ngrams.config.budget  # no joint probability exceeds 1
        if may_be_sure and all(sum(tree.joint[1:]) >= self.sure for tree in grown(none, self.least)):
            found = self._cut([*grown(none, 0.0)])
        else:
            drafted = self._drafted(self.drafter.propose(drafter_state, root))
            found = self._cut([*grown(drafted, self.least)])
        for sequence, tree in zip(sequences, found):
            self.ngrams.send(sequence, tree)
        sent = [sequence.sent for sequence in sequences]
        return tree_of_lists([tree.tokens for tree in sent], [tree.parents for tree in sent], root.device)

    def _cut(self, trees: Sequence[Candidates]) -> Sequence[Candidates]:
        """Return the sub-trees of the best nodes, those that are worth verifying."""
        nodes = self.nodes
        if nodes is None:
            if not isinstance(self.drafter.policy, TimedPolicy):
                return trees
            n = max(len(tree.tokens) for tree in trees)
            joint = [sorted(tree.joint, reverse=True) + [0.0] * (n - len(tree.tokens)) for tree in trees]
            branches = self.ngrams.config.branches * self.ngrams.config.branch_length
            nodes = self.drafter.policy.size(joint, branches) - 1
        return [tree.best(nodes) for tree in trees]

    def _drafted(self, trees: TokenTree) -> list[Drafted]:
        """Return the drafter's trees with their expected acceptance."""
        log_probs = trees.joint_log_probs().numpy(force=True)  # [B, n]
        accepted = np.exp(log_probs) if self.promise is None else self.promise(log_probs)  # [B, n]
        accepted = np.nan_to_num(accepted, nan=0.0)
        parts = trees.tokens, trees.parents, trees.log_probs.exp(), torch.from_numpy(accepted), trees.sizes
        found = []
        for tokens, parents, shares, joint, size in zip(*(part.tolist() for part in parts)):
            tree = Candidates.of(tokens[0])
            for node in range(1, size):  # no child may be more probable than its parent
                above = tree.joint[parents[node]]
                tree.add(parents[node], tokens[node], min(joint[node], above), DRAFTER)
            found.append(Drafted(tree, shares[:size]))
        return found


def hybrid_proposer(
    ngrams: SelfDraft, drafter: TreeProposer, costs: Costs | None, is_here: bool
) -> HybridProposer:
    """Join a bundle's n-grams and drafter.

    Args:
        costs: of the drafter's calibration; None without one.
        is_here: whether they were measured on this machine. If not, the caches keep their own.
    """
    if isinstance(drafter.policy, TimedPolicy):  # it limits the tree of both
        ngrams = ngrams.with_costs(None)
    elif costs is not None and is_here:
        ngrams = ngrams.with_costs(costs.verify, costs.rate)
    return HybridProposer(ngrams, drafter, promise=None if costs is None else costs.promise)
