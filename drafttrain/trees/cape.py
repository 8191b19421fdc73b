"""CAPE (Du et al. 2024, "GliDe with a CaPE"): a chain with side leaves where the drafter is unsure."""

from dataclasses import dataclass

import torch

from drafttrain.trees.drafter import Drafter
from drafttrain.trees.interface import DEEPEST, LARGEST, WIDEST, TreePolicy
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError
from drafttrain.utils.ranges import setting


@dataclass
class CapePolicy(TreePolicy):
    """Chain of the most probable tokens, each with its next most probable siblings: the less probable the
    token, the more siblings (EDD paper, appendix on baselines).

    Attributes:
        max_depth: layers.
        bounds: upper bounds (inclusive) of all confidence classes except the last, ascending.
        widths: children in each class, the chain's token included.
    """

    max_depth: int = setting(5, ge=0, le=DEEPEST)
    bounds: tuple[float, ...] = (0.3, 0.6, 0.8)
    widths: tuple[int, ...] = setting((7, 5, 3, 1), ge=1, le=WIDEST)

    def __post_init__(self) -> None:
        super().__post_init__()
        if list(self.bounds) != sorted(set(self.bounds)):
            raise UserError(f"bounds: must be ascending, got {list(self.bounds)}")
        if len(self.widths) != len(self.bounds) + 1:
            raise UserError(
                f"widths: must be one more than bounds ({len(self.bounds)}), got {list(self.widths)}"
            )
        if (nodes := 1 + self.max_depth * max(self.widths)) > LARGEST:
            raise UserError(
                f"widths: must give at most {LARGEST} nodes, got {nodes} with max_depth {self.max_depth}; "
                "lower one of them"
            )

    def grow(self, drafter: Drafter, state: object, root: torch.Tensor) -> TokenTree:
        """Draft trees after root tokens [B]."""
        tree = TokenTree.root_only(root)
        tip = torch.zeros_like(root)[:, None]  # [B, 1]
        bounds = torch.tensor(self.bounds, dtype=torch.float, device=root.device)
        widths = torch.tensor(self.widths, device=root.device)
        most = min(max(self.widths), drafter.draft_vocab_size)
        for _ in range(self.max_depth):
            log_probs, ids = (x[:, 0] for x in drafter.top(state, tree, tip, most))  # [B, k]
            counts = widths[torch.bucketize(log_probs[:, 0].exp(), bounds)]  # [B] classes are (low, high]
            next_tip = tree.sizes[:, None]
            tree = tree.append(
                tip.expand_as(ids), drafter.to_target(ids), log_probs, counts=counts.clamp(max=most)
            )
            tip = next_tip
        return tree
