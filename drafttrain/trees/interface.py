"""The interface of growth policies."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import torch

from drafttrain.trees.costs import Costs
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.ranges import check_ranges


class TreePolicy(ABC):
    """Decides which nodes a drafter expands.

    A policy is a dataclass: its fields are the settings that `parse.py` reads by name, and a field declared
    with `setting` has a range.

    Attributes:
        max_depth: layers of drafts at most.
        draws: whether candidates are drawn at random, which needs another acceptance rule.
    """

    max_depth: int
    draws = False

    def __post_init__(self) -> None:
        check_ranges(self)

    @classmethod
    def calibrated(cls, costs: Costs, given: Collection[str] = ()) -> dict[str, Any]:
        """Return the settings that a calibration supplies, by default none.

        Args:
            given: names of the settings that the user writes out; they win in any case.
        """
        return {}

    @abstractmethod
    def grow(self, drafter: Drafter, state: Any, root: torch.Tensor) -> TokenTree:
        """Draft trees of at most `max_depth` layers after each root token [B]."""

    def set_active(self, seeds: Sequence[int], positions: Sequence[int]) -> None:
        """Note the seeds of the sequences that the next trees are for, and how many tokens each has emitted;
        only policies that draw need them."""
