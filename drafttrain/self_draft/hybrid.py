"""N-gram candidates and a trained drafter's in one tree (`ngram+…`).

Where the caches' candidates are probable enough, they are verified alone, which saves the drafter's forwards.
Elsewhere the more probable ones are added to the drafter's tree.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from drafttrain.inference.proposer import Proposer, TreeProposer
from drafttrain.self_draft.candidates import Candidates, Features
from drafttrain.self_draft.proposer import SelfDraft
from drafttrain.trees.lists import tree_of_lists
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError

DRAFTER: Features = (("drafter", 0, 0),)


@dataclass
class HybridProposer(Proposer):
    """A drafter whose trees get the caches' candidates as further branches.

    Attributes:
        ngrams: the caches. They also learn the target's predictions after the drafter's nodes.
        drafter: the drafter with its growth policy.
        sure: the drafter is skipped if the joint probabilities of each sequence's candidates sum up to this.
        least: least joint probability of a candidate that is added to the drafter's tree.
    """

    ngrams: SelfDraft
    drafter: TreeProposer
    sure: float = 1.0
    least: float = 0.2

    def __post_init__(self) -> None:
        if self.drafter.draws:
            raise UserError(
                "tree: ngram+ must join a tree of most probable tokens, got drawn candidates; n-grams have "
                "no probabilities to draw from"
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
        return tree_of_lists([tree.tokens for tree in sent], [tree.parents for tree in sent], root.device)

    def _join(self, tokens: list[int], parents: list[int], ngrams: Candidates) -> Candidates:
        """Return the drafter's tree with the candidates added that are probable enough."""
        tree, known, same = Candidates.of(tokens[0]), ngrams.index(), {0: 0}
        for node, (token, parent) in enumerate(zip(tokens[1:], parents[1:]), 1):
            # a node that is also a candidate takes its features, so that the outcome updates their model
            both = known.get((same.get(parent), token))
            if both is not None:
                same[node] = both
            tree.add(parent, token, 1.0, DRAFTER if both is None else ngrams.evidence[both])
        return tree.with_nodes(ngrams, self.least)
