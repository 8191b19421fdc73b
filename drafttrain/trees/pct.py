"""PCT, the pruned candidate tree (EDD paper, §3.2): expand a node only where drafting is expected to pay."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from drafttrain.kernels.growth import grow_best
from drafttrain.trees.costs import Costs
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.expand import add_children
from drafttrain.trees.interface import DEEPEST, LARGEST, WIDEST, TreePolicy
from drafttrain.trees.native import grow_natively
from drafttrain.trees.tree import TokenTree, marked_nodes
from drafttrain.utils.errors import UserError
from drafttrain.utils.ranges import setting


@dataclass
class PctPolicy(TreePolicy):
    """PCT's growth: a node is expanded if a drafting step from it pays, that is if it is accepted with a
    probability of at least s_d / s_t (eq. 5), estimated by its confidence, the joint probability of its path.

    A node below the ratio stays in the tree but gets no children. At the end nodes below `min_confidence` are
    removed, with their descendants.

    Attributes:
        draft_seconds: s_d, the time of one drafting step.
        verify_seconds: s_t, the time of one target forward. Neither is needed with a threshold.
        width: children of an expanded node.
        max_depth: layers at most.
        min_confidence: least confidence of a verified node.
        threshold: least confidence of an expanded node; None for s_d / s_t.
    """

    draft_seconds: float | None = setting(None, gt=0)
    verify_seconds: float | None = setting(None, gt=0)
    width: int = setting(5, ge=1, le=WIDEST)
    max_depth: int = setting(10, ge=0, le=DEEPEST)
    min_confidence: float = setting(0.01, ge=0, le=1)
    threshold: float | None = setting(None, gt=0, le=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threshold is not None:
            return
        if self.draft_seconds is None or self.verify_seconds is None:
            raise UserError(
                "draft_seconds, verify_seconds: missing; run drafttrain calibrate first, or give a threshold"
            )
        if self.draft_seconds >= self.verify_seconds:
            raise UserError(
                f"draft_seconds: must be < verify_seconds ({self.verify_seconds}), got "
                f"{self.draft_seconds}; drafting pays only where it is faster than the target"
            )

    @classmethod
    def calibrated(cls, costs: Costs, given: Collection[str] = ()) -> dict[str, Any]:
        """Return s_d and s_t, both taken as constant (EDD paper, eq. 5), unless a threshold is given."""
        if "threshold" in given:
            return {}
        return {"draft_seconds": costs.draft(1), "verify_seconds": costs.target(1)}

    @property
    def ratio(self) -> float:
        """Return the least confidence of an expanded node."""
        return self.draft_seconds / self.verify_seconds if self.threshold is None else self.threshold

    def grow(self, drafter: Drafter, state: object, root: torch.Tensor) -> TokenTree:
        """Draft trees after root tokens [B]."""
        # native growth gives all rows equally many nodes; in a batch their numbers differ
        if len(root) == 1 and self.width <= drafter.draft_vocab_size:
            limits = self.width, LARGEST, self.max_depth, LARGEST, self.ratio, self.min_confidence
            if (grown := grow_natively(drafter, grow_best, state, root, *limits)) is not None:
                return grown
        tree = TokenTree.root_only(root)
        for depth in range(self.max_depth):
            # padding nodes have probability 0
            joint, room = tree.joint_log_probs(), (LARGEST - tree.width) // self.width  # [B, n]
            pays = (joint.exp() >= self.ratio) & (tree.depths == depth)  # [B, n]
            if pays.shape[1] > room:  # the best ones, if too many pay
                best = joint.masked_fill(~pays, -torch.inf).topk(max(room, 0)).indices  # [B, room]
                pays &= torch.zeros_like(pays).scatter(1, best, True)
            frontier, counts = marked_nodes(pays)
            if not frontier.shape[1]:
                break
            tree = add_children(drafter, state, tree, frontier, counts, self.width)
        return tree.select(tree.joint_log_probs().exp() >= self.min_confidence)
