"""Helpers for layer-by-layer policies: expansion of a frontier, and the entropy of its distributions."""

import numpy as np
import torch

from drafttrain.trees.drafter import Drafter
from drafttrain.trees.tree import TokenTree

ENTROPY_OVER = 1000  # most probable tokens that the entropy of a distribution counts (C2T paper, eq. 3)


def add_children(
    drafter: Drafter,
    state: object,
    tree: TokenTree,
    frontier: torch.Tensor,
    counts: torch.Tensor | None,
    k: int,
    entropies: bool = False,
) -> TokenTree:
    """Append the k most probable children of each node of the frontier.

    Args:
        frontier: nodes of the deepest layer, int64 [B, f]; rows with fewer are padded with the root.
        counts: how many of them are no padding, int64 [B]. None: all.
        k: children per node; all tokens where the draft vocabulary has fewer.
        entropies: keep the entropy of the distribution that each child comes from.
    """
    entropy = None
    if entropies:
        expanded = drafter.expand(state, tree, frontier)  # [B, f, D]
        log_probs, ids = expanded.topk(min(k, drafter.draft_vocab_size))  # [B, f, k]
        entropy = top_entropy(expanded)[:, :, None].expand_as(ids).flatten(1)  # [B, f * k]
    else:
        log_probs, ids = drafter.top(state, tree, frontier, k)  # [B, f, k]
    parents = frontier[:, :, None].expand_as(ids)  # [B, f, k]
    return tree.append(
        parents.flatten(1),
        drafter.to_target(ids).flatten(1),
        log_probs.flatten(1),
        entropies=entropy,
        # a single row has no padding
        counts=None if counts is None or len(frontier) == 1 else counts * ids.shape[2],
    )


def next_layer(
    tree: TokenTree, frontier: torch.Tensor, log_probs: torch.Tensor, tokens: torch.Tensor, width: int
) -> TokenTree:
    """Append the `width` most probable of some children of the deepest layer, by joint log-probability
    (PipeDec, §3.3.3), in breadth-first order; all of them where there are fewer.

    Args:
        frontier: the nodes with children, int64 [B, f].
        log_probs, tokens: of the children, fp32 and int64 [B, f, c].
    """
    joint = tree.joint_log_probs().gather(1, frontier)[:, :, None] + log_probs  # [B, f, c]
    best = joint.flatten(1).topk(min(width, joint[0].numel())).indices.sort(1).values  # [B, w]
    parents = frontier.gather(1, best // log_probs.shape[2])  # [B, w]
    return tree.append(parents, tokens.flatten(1).gather(1, best), log_probs.flatten(1).gather(1, best))


def top_entropy(log_probs: torch.Tensor) -> torch.Tensor:
    """Return the entropy in nats over the 1000 most probable tokens, without renormalizing, fp32 [...]; over
    all of a smaller vocabulary (C2T paper, eq. 3).

    Args:
        log_probs: fp32 [..., D].
    """
    if log_probs.device.type == "cpu":
        top, tail = log_probs.numpy(), log_probs.shape[-1] - ENTROPY_OVER  # [..., D]
        if tail > 0:  # the same numbers as topk's in another order, and many times faster
            top = np.partition(top, tail, axis=-1)[..., tail:]  # [..., 1000]
        top = np.maximum(top, -1e4)  # 0 for a probability of 0, whose logarithm is -inf
        return torch.from_numpy(-np.vecdot(np.exp(top), top))
    top = log_probs.topk(min(log_probs.shape[-1], ENTROPY_OVER), sorted=False).values  # [..., 1000]
    return -(top.exp() * top.clamp(min=-1e4)).sum(-1)
