"""EAGLE-2 (Li et al. 2024): expand the best nodes of each layer, then keep the best nodes of all."""

from dataclasses import dataclass

import torch

from drafttrain.kernels.growth import grow_best
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.expand import add_children
from drafttrain.trees.interface import DEEPEST, LARGEST, WIDEST, TreePolicy
from drafttrain.trees.native import grow_natively
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError
from drafttrain.utils.ranges import setting


@dataclass
class Eagle2Policy(TreePolicy):
    """EAGLE-2's growth: each layer expands the `top_k` nodes of highest joint probability by `top_k` children
    each; at the end the `total` best nodes of all stay. The EDD paper runs it with 50 nodes, depth 6, top-10.

    Attributes:
        top_k: expanded nodes of a layer, and children of each.
        max_depth: layers.
        total: drafted nodes that are verified, root excluded; None: all of them.
    """

    top_k: int = setting(10, ge=1, le=WIDEST)
    max_depth: int = setting(6, ge=0, le=DEEPEST)
    total: int | None = setting(50, ge=0, le=LARGEST)

    def __post_init__(self) -> None:
        super().__post_init__()
        grown = self.top_k * (1 + self.top_k * max(self.max_depth - 1, 0)) if self.max_depth else 0
        if grown > LARGEST:
            raise UserError(
                f"top_k: must grow at most {LARGEST} nodes before the best are kept, got {grown} with top_k "
                f"{self.top_k} and max_depth {self.max_depth}; lower one of them"
            )

    def grow(self, drafter: Drafter, state: object, root: torch.Tensor) -> TokenTree:
        """Draft trees after root tokens [B]."""
        if self.top_k <= drafter.draft_vocab_size:
            limits = self.top_k, self.top_k, self.max_depth, LARGEST if self.total is None else self.total
            if (grown := grow_natively(drafter, grow_best, state, root, *limits)) is not None:
                return grown
        tree = expand_best(drafter, state, root, self.top_k, self.max_depth)
        return tree if self.total is None else keep_best(tree, self.total)


def expand_best(
    drafter: Drafter, state: object, root: torch.Tensor, top_k: int, max_depth: int, entropies: bool = False
) -> TokenTree:
    """Grow EAGLE-2's tree before the rerank: in each layer the `top_k` nodes of highest joint probability
    get `top_k` children each. All rows have the same shape.

    Args:
        entropies: keep the entropy of the distribution that each node comes from.
    """
    tree = TokenTree.root_only(root)
    frontier = torch.zeros_like(root)[:, None]  # [B, 1]
    for depth in range(max_depth):
        before = tree.width
        tree = add_children(drafter, state, tree, frontier, None, top_k, entropies)
        if depth < max_depth - 1:
            joint = tree.joint_log_probs()[:, before:]  # [B, added]
            best = joint.topk(min(top_k, joint.shape[1])).indices  # [B, f]
            frontier = before + best.sort(dim=1).values  # in breadth-first order
    return tree


def keep_best(tree: TokenTree, total: int) -> TokenTree:
    """Return the sub-tree of the root and the `total` nodes of highest joint probability.

    Among equals the earlier node wins. A node is never more probable than its parent, which comes before it,
    so the ancestors of a node that is kept are kept too.
    """
    joint = tree.joint_log_probs().clone()  # [B, n]
    joint[:, 0] = torch.inf
    order = joint.argsort(dim=1, descending=True, stable=True)[:, : total + 1]  # [B, total + 1]
    keep = torch.zeros_like(joint, dtype=torch.bool).scatter_(1, order, True)
    return tree.select(keep)
