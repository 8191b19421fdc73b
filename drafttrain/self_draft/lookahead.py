"""Lookahead decoding (Fu et al. 2024), a baseline of Self-Draft: a window of guesses at the next W positions
is refined by Jacobi iterations inside the forwards that verify, and every column of it gives an n-gram.

The window is a tree: its first level is the root and a chain after it, and the token of column i is followed
by the guesses of the later levels for that column, each one position further on. So the same loop decodes it.
"""

import random
from dataclasses import dataclass, field

import torch

from drafttrain.inference.per_sequence import PerSequence
from drafttrain.self_draft.candidates import Candidates, Features
from drafttrain.self_draft.context_cache import BRANCH
from drafttrain.trees.lists import tree_of_lists
from drafttrain.trees.tree import TokenTree

POOL: Features = (("pool", 0, 0),)
WINDOW: Features = ((BRANCH, 0, 0),)


@dataclass
class _Sequence:
    """State of one sequence.

    Attributes:
        levels: levels of the window, oldest first: W - 1 tokens after the root in the first, W in the others.
        pool: continuations of N - 1 tokens by the token before them; the newest last.
        columns: nodes of each column in the tree that is being verified, without the root.
        root: root token of that tree.
        size: number of its nodes.
    """

    levels: list[list[int]]
    pool: dict[int, dict[tuple[int, ...], None]] = field(default_factory=dict)
    columns: list[list[int]] = field(default_factory=list)
    root: int = 0
    size: int = 0


@dataclass
class Lookahead(PerSequence):
    """Proposer of lookahead decoding.

    Attributes:
        window: W, positions that are guessed at.
        gram: N; n-grams have N tokens, and the window N - 1 levels.
        verified: G, n-grams that are verified at a time, at most.
        vocab_size: the target's vocabulary size; the window starts from random tokens.
        seed: seed of the random tokens.
    """

    window: int
    gram: int
    verified: int
    vocab_size: int
    seed: int = 0

    def new_state(self, batch: int, max_len: int) -> list[_Sequence]:
        draws = random.Random(self.seed)
        start = [draws.randrange(self.vocab_size) for _ in range(self.window - 1)]
        return [_Sequence([list(start)]) for _ in range(batch)]

    def update(
        self, state: list[_Sequence], tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor
    ) -> None:
        pass  # the pool is filled by the window alone

    def propose(self, state: list[_Sequence], root: torch.Tensor) -> TokenTree:
        trees = []
        for sequence, token in zip(state, root.tolist()):
            grams = list(sequence.pool.get(token, ()))[: -self.verified - 1 : -1]  # the newest first
            tree, _ = Candidates.of(token).with_chains(grams, POOL)
            first, *later = sequence.levels
            columns = [[*first[:i], *(level[i] for level in later)] for i in range(self.window)]
            tree, sequence.columns = tree.with_chains(columns, WINDOW)
            sequence.root, sequence.size = token, len(tree.tokens)
            trees.append(tree)
        return tree_of_lists([tree.tokens for tree in trees], [tree.parents for tree in trees], root.device)

    def harvest(self, state: list[_Sequence], tree: TokenTree, logits: torch.Tensor) -> None:
        """Learn the target's next guess for each column, from logits [B, n, V]."""
        said = logits.max(-1).indices.tolist()  # [B, n]
        for sequence, row, size in zip(state, said, tree.sizes.tolist()):
            if size == sequence.size:  # else the output's limit has cut the tree
                self._refine(sequence, [row[column[-1] if column else 0] for column in sequence.columns])

    def _refine(self, sequence: _Sequence, guesses: list[int]) -> None:
        sequence.levels.append(guesses)
        if len(sequence.levels) == self.gram:
            first, *later = sequence.levels
            for key, *rest in zip([sequence.root, *first], *later):
                grams = sequence.pool.setdefault(key, {})
                grams.pop(tuple(rest), None)
                grams[tuple(rest)] = None
                while len(grams) > self.verified:
                    del grams[next(iter(grams))]
            sequence.levels = [later[0][1:], *later[1:]]  # the root moves on by one
