"""What the proposer asks of a growth policy."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from drafttrain.trees.drafter import Drafter
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError


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


def check_children(name: str, key: str, value: int) -> None:
    """Require at least one child of an expanded node.

    Raises:
        UserError: there are fewer.
    """
    if value < 1:
        raise UserError(f"{name}: {key} must be >= 1, got {value}; 1 grows a chain")
