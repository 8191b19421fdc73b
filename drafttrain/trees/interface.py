"""What the proposer asks of a growth policy."""

from typing import Any, Protocol

import torch

from drafttrain.drafters.interface import Drafter
from drafttrain.trees.tree import TokenTree


class TreePolicy(Protocol):
    """Decides which nodes a drafter expands. One that knows something of single prompts has a method
    `use_rows(numbers)`, too, which is told which prompts the next trees are for."""

    max_depth: int

    def grow(self, drafter: Drafter, state: Any, root: torch.Tensor) -> TokenTree:
        """Drafts trees of at most `max_depth` layers behind each root token [B]."""
