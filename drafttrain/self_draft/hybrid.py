"""N-gram candidates beside a trained drafter's, in one tree (`ngram+…`).

Where the caches are sure, they are verified alone and the drafter is not even asked: that saves its forwards.
Elsewhere what they are fairly sure of is added to the drafter's tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drafttrain.inference.proposer import Proposer, TreeProposer
from drafttrain.self_draft.candidates import Candidates, Features
from drafttrain.self_draft.proposer import SelfDraft
from drafttrain.trees.tree import TokenTree

DRAFTER: Features = (("drafter", 0, 0),)


@dataclass
class HybridProposer(Proposer):
    """A drafter whose trees get the caches' candidates as further branches.

    Attributes:
        ngrams: the caches. What they learn includes what the target says behind the drafter's nodes.
        drafter: with its growth policy.
        sure: sum of the candidates' shares from which the drafter is not asked.
        least: share of accepted ones that a candidate beside the drafter's is expected to reach.
    """

    ngrams: SelfDraft
    drafter: TreeProposer
    sure: float = 1.0
    least: float = 0.2

    @property
    def model_seconds(self) -> float:
        return self.drafter.model_seconds

    def new_state(self, batch: int, max_len: int) -> tuple[list, Any]:
        return self.ngrams.new_state(batch, max_len), self.drafter.new_state(batch, max_len)

    def set_active(self, numbers: Sequence[int]) -> None:
        self.drafter.set_active(numbers)

    def select_rows(self, state: tuple[list, Any], rows: torch.Tensor) -> tuple[list, Any]:
        return self.ngrams.select_rows(state[0], rows), self.drafter.select_rows(state[1], rows)

    def append_rows(self, state: tuple[list, Any], other: tuple[list, Any]) -> tuple[list, Any]:
        return self.ngrams.append_rows(state[0], other[0]), self.drafter.append_rows(state[1], other[1])

    def update(
        self, state: tuple[list, Any], tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor
    ) -> None:
        self.ngrams.update(state[0], tokens, tapped, counts)
        self.drafter.update(state[1], tokens, tapped, counts)

    def harvest(self, state: tuple[list, Any], tree: TokenTree, logits: torch.Tensor) -> None:
        self.ngrams.harvest(state[0], tree, logits)

    def propose(self, state: tuple[list, Any], root: torch.Tensor) -> TokenTree:
        sequences, drafter_state = state
        found = [self.ngrams.candidates(sequence, token) for sequence, token in zip(sequences, root.tolist())]
        if any(sum(tree.joint[1:]) < self.sure for tree in found):
            drafted = self.drafter.propose(drafter_state, root)
            rows = zip(drafted.tokens.tolist(), drafted.parents.tolist(), drafted.sizes.tolist())
            found = [
                self._join(tokens[:size], parents[:size], tree)
                for (tokens, parents, size), tree in zip(rows, found)
            ]
        for sequence, tree in zip(sequences, found):
            self.ngrams.send(sequence, tree)
        sent = [sequence.sent for sequence in sequences]
        return TokenTree.from_lists(
            [tree.tokens for tree in sent], [tree.parents for tree in sent], root.device
        )

    def _join(self, tokens: list[int], parents: list[int], ngrams: Candidates) -> Candidates:
        """The drafter's nodes, and behind them the candidates that are likely enough."""
        tree, known, same = Candidates.of(tokens[0]), ngrams.index(), {0: 0}
        for node, (token, parent) in enumerate(zip(tokens[1:], parents[1:]), 1):
            # what the caches hold as well is theirs to learn from
            both = known.get((same.get(parent), token))
            if both is not None:
                same[node] = both
            tree.add(parent, token, 1.0, DRAFTER if both is None else ngrams.evidence[both])
        return tree.with_nodes(ngrams, self.least)
