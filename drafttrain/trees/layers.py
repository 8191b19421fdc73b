"""What layered policies share: which nodes of a batch of trees are expanded, and their children."""

import torch

from drafttrain.drafters.interface import Drafter
from drafttrain.trees.tree import TokenTree


def marked_nodes(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices of the nodes marked in bool [B, n], in order.

    Returns:
        nodes int64 [B, f], padded with the root, and how many of each row are no padding, int64 [B].
    """
    counts = mask.sum(1)  # [B]
    width = int(counts.max())
    nodes = (~mask).byte().argsort(dim=1, stable=True)[:, :width]  # [B, f]
    return nodes.masked_fill(torch.arange(width, device=mask.device) >= counts[:, None], 0), counts


def add_children(
    drafter: Drafter, state: object, tree: TokenTree, frontier: torch.Tensor, counts: torch.Tensor, k: int
) -> TokenTree:
    """Gives each node of the frontier its k most probable children.

    Args:
        frontier: nodes of the deepest layer, int64 [B, f]; rows with fewer are padded with the root, which is
            expanded once more for nothing.
        counts: how many of them are no padding, int64 [B].
        k: children per node; all tokens where the draft vocabulary has fewer.
    """
    log_probs, ids = drafter.expand(state, tree, frontier).topk(min(k, drafter.draft_vocab_size))  # [B, f, k]
    parents = frontier[:, :, None].expand_as(ids)  # [B, f, k]
    return tree.append(
        parents.flatten(1),
        drafter.to_target(ids).flatten(1),
        log_probs.flatten(1),
        counts=counts * ids.shape[2],
    )
