"""The simplest growth policy: a chain of the drafter's most probable tokens."""

from dataclasses import dataclass

import torch

from drafttrain.trees.drafter import Drafter
from drafttrain.trees.interface import DEEPEST, TreePolicy
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.ranges import setting


@dataclass
class ChainPolicy(TreePolicy):
    """Chain of `length` draft tokens, one per drafting step.

    Attributes:
        length: draft tokens, root excluded.
    """

    length: int = setting(ge=0, le=DEEPEST)

    @property
    def max_depth(self) -> int:
        """Return the depth of the deepest node that `grow` may draft."""
        return self.length

    def grow(self, drafter: Drafter, state: object, root: torch.Tensor) -> TokenTree:
        """Draft a chain after each root token [B]."""
        tree = TokenTree.root_only(root)
        for depth in range(self.length):
            last = torch.full_like(root, depth)[:, None]  # [B, 1] node index
            log_probs, ids = drafter.top(state, tree, last, 1)  # [B, 1, 1]
            tree = tree.append(last, drafter.to_target(ids)[..., 0], log_probs[..., 0])
        return tree
