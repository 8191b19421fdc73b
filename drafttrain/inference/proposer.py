"""Who the decode loop asks for trees: a model drafter with a growth policy, or nobody."""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from drafttrain.drafters.interface import Drafter
from drafttrain.trees.tree import TokenTree


class Proposer(Protocol):
    """Proposes a tree behind the last committed token. It sees verified tokens only: nothing is ever rolled
    back."""

    def new_state(self, batch: int, max_len: int) -> Any:
        """Empty state for `batch` sequences of at most `max_len` tokens, prompt included."""

    def observe(self, state: Any, tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor) -> None:
        """Takes in what the target has verified: the prompts, then each accepted path, root first.

        Args:
            tokens: [B, m], of which the first counts[b] are valid in row b (0 in rows that have finished).
            tapped: the target's tapped hidden states at these tokens, [B, m, K*H].
            counts: [B].
        """

    def propose(self, state: Any, root: torch.Tensor) -> TokenTree:
        """Trees whose roots are the last emitted tokens [B], which have not been observed yet."""


class TreePolicy(Protocol):
    """Decides which nodes a drafter expands."""

    max_depth: int

    def grow(self, drafter: Drafter, state: Any, root: torch.Tensor) -> TokenTree:
        """Drafts trees of at most `max_depth` layers behind each root token [B]."""


@dataclass
class TreeProposer:
    """A model drafter whose trees grow by a policy."""

    drafter: Drafter
    policy: TreePolicy

    def new_state(self, batch: int, max_len: int) -> Any:
        return self.drafter.new_state(batch, max_len + self.policy.max_depth)

    def observe(self, state: Any, tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor) -> None:
        self.drafter.observe(state, tokens, tapped, counts)

    def propose(self, state: Any, root: torch.Tensor) -> TokenTree:
        return self.policy.grow(self.drafter, state, root)


class NoProposer:
    """Drafts nothing, which makes the decode loop plain autoregressive decoding."""

    def new_state(self, batch: int, max_len: int) -> None:
        return None

    def observe(self, state: None, tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor) -> None:
        pass

    def propose(self, state: None, root: torch.Tensor) -> TokenTree:
        return TokenTree.root_only(root)
