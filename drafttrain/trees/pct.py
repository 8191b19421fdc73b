"""PCT, the pruned candidate tree (EDD paper, §3.2): expand a node only where drafting is expected to pay."""

from dataclasses import dataclass

import torch

from drafttrain.trees.drafter import Drafter
from drafttrain.trees.expand import add_children
from drafttrain.trees.interface import TreePolicy, check_children
from drafttrain.trees.tree import TokenTree, marked_nodes
from drafttrain.utils.errors import UserError


@dataclass
class PctPolicy(TreePolicy):
    """A drafting step pays if the token it starts from is accepted with more than s_d / s_t (eq. 5). The
    confidence of a node, the joint probability of its path, stands for that probability.

    A node below the ratio stays in the tree but gets no children. At the end nodes below `min_confidence` go,
    with all that is below them.

    Attributes:
        draft_seconds: s_d, one drafting step.
        verify_seconds: s_t, one forward of the target. Neither is needed with a threshold.
        width: children of an expanded node.
        max_depth: layers at most.
        min_confidence: of the nodes that are verified.
        threshold: least confidence of an expanded node; None for s_d / s_t.
    """

    draft_seconds: float | None = None
    verify_seconds: float | None = None
    width: int = 5
    max_depth: int = 10
    min_confidence: float = 0.01
    threshold: float | None = None

    def __post_init__(self) -> None:
        check_children("pct", "width", self.width)
        if self.threshold is not None:
            if not 0 < self.threshold <= 1:
                raise UserError(f"PCT: threshold {self.threshold} must lie above 0 and not above 1")
            return
        if self.draft_seconds is None or self.verify_seconds is None:
            raise UserError(
                "PCT: draft_seconds, verify_seconds is missing; run drafttrain calibrate first, or give a "
                "threshold"
            )
        if not 0 < self.draft_seconds < self.verify_seconds:
            raise UserError(
                f"PCT: a drafting step takes {self.draft_seconds} s and a forward of the target "
                f"{self.verify_seconds} s; drafting pays only where it is the faster of the two"
            )

    @property
    def ratio(self) -> float:
        """Least confidence of an expanded node."""
        return self.draft_seconds / self.verify_seconds if self.threshold is None else self.threshold

    def grow(self, drafter: Drafter, state: object, root: torch.Tensor) -> TokenTree:
        """Drafts trees behind root tokens [B]."""
        tree = TokenTree.root_only(root)
        for depth in range(self.max_depth):
            # padding nodes have probability 0
            pays = (tree.joint_log_probs().exp() >= self.ratio) & (tree.depths == depth)  # [B, n]
            frontier, counts = marked_nodes(pays)
            if not frontier.shape[1]:
                break
            tree = add_children(drafter, state, tree, frontier, counts, self.width)
        return tree.select(tree.joint_log_probs().exp() >= self.min_confidence)
