"""The interface of model drafters, as the decode loop and the tree policies use them."""

from typing import Any, Protocol

import torch

from drafttrain.trees.tree import TokenTree


class Drafter(Protocol):
    """Weights apart from per-sequence state: one copy of the weights serves any number of sequences.

    Attributes:
        draft_vocab_size: tokens that it can draft, D.
        max_depth: depth of the deepest node that it can draft, if it is limited; else absent or None.
    """

    draft_vocab_size: int

    def new_state(self, batch: int, max_len: int) -> Any:
        """Return the empty state of `batch` sequences of at most `max_len` tokens, drafts included."""

    def select_rows(self, state: Any, rows: torch.Tensor) -> Any:
        """Return the state of the sequences of these numbers, int64 [b]; one that is named twice becomes two
        independent ones, and those that are not named have ended."""

    def replace_rows(self, state: Any, rows: torch.Tensor, other: Any) -> None:
        """Put the sequences of another state in the place of those of these numbers, int64 [b]."""

    def update(self, state: Any, tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor) -> None:
        """Append what the target has verified: tokens [B, m] and their tapped states [B, m, K·H], of which
        the first counts[b] are valid in row b. Called after the prompt and after each verification."""

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
