"""The interfaces of growth policies and of the confidence that some of them use."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from drafttrain.trees.drafter import Drafter
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.ranges import check_ranges

if TYPE_CHECKING:  # only some policies use costs
    from drafttrain.trees.costs import Costs

# at most: layers; children of a node, or expanded nodes of a layer; nodes of a tree
DEEPEST, WIDEST, LARGEST = 128, 128, 4096


class Confidence(Protocol):
    """Predictor of how likely nodes are to be accepted. It runs on the host, in numpy: growth waits for the
    confidence of some dozens of nodes, and one torch operator costs more than all the arithmetic.

    Attributes:
        features: the names in `features.FEATURES` that it reads.
    """

    features: Sequence[str]

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Return confidences between 0 and 1, fp32 [...], for features fp32 [..., F]."""


class TreePolicy(ABC):
    """Growth policy, which decides which nodes a drafter expands.

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
    def calibrated(cls, costs: "Costs", given: Collection[str] = ()) -> dict[str, Any]:
        """Return the settings that a calibration supplies, by default none.

        Args:
            given: names of the settings that the user gives; these always win.
        """
        return {}

    @abstractmethod
    def grow(self, drafter: Drafter, state: Any, root: torch.Tensor) -> TokenTree:
        """Draft trees of at most `max_depth` layers after each root token [B]."""

    def set_active(self, seeds: Sequence[int], positions: Sequence[int]) -> None:
        """Set the seeds of the sequences that the next trees are for, and how many tokens each has emitted;
        only policies that draw need them."""

    def note_step(self, batch: int, tokens: int, seconds: float) -> None:
        """Record the tokens and seconds of a batch's last step, for policies that learn from them."""
