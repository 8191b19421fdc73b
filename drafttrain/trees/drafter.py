"""The interface of model drafters, as the decode loop and the tree policies use them."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from drafttrain.trees.tree import TokenTree


class Drafter(Protocol):
    """A drafter whose weights hold no per-sequence state: one copy serves any number of sequences.

    Attributes:
        draft_vocab_size: number of tokens that it can draft, D.
        max_depth: depth of the deepest node that it can draft, if it is limited; else absent or None.
        grow_natively: `grow_natively(grow, state, root, ...)` returns the result of `grow`, a function of
            `kernels/growth.py`, for this drafter; None if it cannot; may be absent. `update` has to follow:
            these trees cannot be expanded further.
    """

    draft_vocab_size: int

    def new_state(self, batch: int, max_len: int) -> Any:
        """Return the empty state of `batch` sequences, with room for `max_len` tokens of each, drafts
        included."""

    def select_rows(self, state: Any, rows: torch.Tensor) -> Any:
        """Return the state of these rows, int64 [b]. A row that is named twice becomes two independent
        sequences; rows that are not named have ended."""

    def append_rows(self, state: Any, other: Any) -> Any:
        """Return the state with the sequences of `other` appended to those of `state`."""

    def prefix(self, state: Any, length: int, room: int, tapped: torch.Tensor) -> Any:
        """Return an independent state for the first `length` tokens of the only sequence of `state`, with
        room for `room` tokens; `tapped` [K·H] are the target's tapped states at the last of the `length`."""

    def join(self, states: Sequence[Any]) -> Any:
        """Return one state for the sequences of several states, for an update and a tree. Do not touch the
        states until `split`. Nothing as large as a KV cache is copied."""

    def split(self, joined: Any, states: Sequence[Any]) -> None:
        """Write the changes made to `joined` back to the states that it was made of."""

    def update(self, state: Any, tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor) -> None:
        """Append verified tokens [B, m] and the target's tapped states at them [B, m, K·H], of which the
        first counts[b] are valid in row b. Called after the prompt and after each verification."""

    def prune(self, state: Any, root: torch.Tensor, tapped: torch.Tensor, keep: torch.Tensor) -> None:
        """Append the tree's root, which has been expanded and is now verified, and keep what is cached
        for some other nodes, which become the first ones of the next tree. For a state of one sequence.

        Args:
            root: token of the root, int64 [1].
            tapped: the target's tapped states at the root, [1, K·H].
            keep: nodes of the tree that are kept, ascending, without the root, int64 [w].
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
