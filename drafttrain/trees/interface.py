"""What the proposer asks of a growth policy."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from drafttrain.trees.drafter import Drafter
from drafttrain.trees.tree import TokenTree


class TreePolicy(ABC):
    """Decides which nodes a drafter expands.

    Attributes:
        max_depth: layers of drafts at most.
    """

    max_depth: int

    @abstractmethod
    def grow(self, drafter: Drafter, state: Any, root: torch.Tensor) -> TokenTree:
        """Draft trees of at most `max_depth` layers after each root token [B]."""

    def set_active(self, numbers: Sequence[int]) -> None:
        """Note which prompts the next trees are for; most policies treat all alike."""
