"""The interface of model drafters, as the decode loop and the tree policies use them."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from drafttrain.trees.tree import TokenTree


class Drafter(Protocol):
    """Weights apart from per-sequence state: one copy of the weights serves any number of sequences.

    Attributes:
        draft_vocab_size: tokens that it can draft, D.
        max_depth: depth of the deepest node that it can draft, if it is limited; else absent or None.
        grow_natively: `grow_natively(grow, state, ...)` returns what `grow` of `kernels/growth.py` grows, or
            None where that cannot be; may be absent. After it comes `update`: the tree is not drafted on.
    """

    draft_vocab_size: int

    def new_state(self, batch: int, max_len: int) -> Any:
        """Return the empty state of `batch` sequences, with room for `max_len` tokens of each, drafts
        included."""

    def select_rows(self, state: Any, rows: torch.Tensor) -> Any:
        """Return the state of the sequences of these numbers, int64 [b]; one that is named twice becomes two
        independent ones, and those that are not named have ended."""

    def append_rows(self, state: Any, other: Any) -> Any:
        """Return the state of these sequences and, after them, those of another state."""

    def prefix(self, state: Any, length: int, room: int, tapped: torch.Tensor) -> Any:
        """Return a state of its own for the first `length` tokens of the only sequence of `state`, with room
        for `room` tokens. The target's tapped states at the last of them are [K·H]."""

    def join(self, states: Sequence[Any]) -> Any:
        """Return the sequences of several states as one, for an update and a tree; `split` follows, and
        nobody touches the states before it. Nothing as large as a cache is copied."""

    def split(self, joined: Any, states: Sequence[Any]) -> None:
        """Give the states what has happened to them in `joined`."""

    def update(self, state: Any, tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor) -> None:
        """Append what the target has verified: tokens [B, m] and their tapped states [B, m, K·H], of which
        the first counts[b] are valid in row b. Called after the prompt and after each verification."""

    def prune(self, state: Any, root: torch.Tensor, tapped: torch.Tensor, keep: torch.Tensor) -> None:
        """Append the tree's root, which has been expanded and is now verified, and keep what is known of
        other nodes, which become the first ones of the next tree. For a state of one sequence.

        Args:
            root: its token, int64 [1].
            tapped: the target's tapped states there, [1, K·H].
            keep: nodes of the tree, ascending, without the root, int64 [w].
        """

    def expand(self, state: Any, tree: TokenTree, frontier: torch.Tensor) -> torch.Tensor:
        """Return log-probabilities [B, f, D] (fp32, draft vocabulary) of the tokens after the nodes frontier
        [B, f].

        Every ancestor of a frontier node must have been expanded before, in this state, for this tree.
        """

    def top(
        self, state: Any, tree: TokenTree, frontier: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the k most probable tokens after the nodes frontier [B, f], best first; all of them if the
        vocabulary has fewer.

        Returns:
            log-probabilities as `expand` gives them, fp32 [B, f, k], and ids in the draft vocabulary, int64
            [B, f, k].
        """
        return self.expand(state, tree, frontier).topk(min(k, self.draft_vocab_size))

    def to_target(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the target token ids of draft-vocabulary ids, same shape."""
