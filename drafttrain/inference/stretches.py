"""Chunked prefill of long prompts: the mask of a whole prompt grows with the square of its length."""

from collections.abc import Sequence

import torch

from drafttrain.target_lm.cache import TreeCache
from drafttrain.target_lm.masks import causal
from drafttrain.target_lm.model import FrozenTarget, TargetStates


def encode_in_stretches(
    target: FrozenTarget, cache: TreeCache, tokens: torch.Tensor, lengths: torch.Tensor, stretch: int
) -> TargetStates:
    """Prefill prompts in chunks and commit them to the cache.

    Args:
        tokens: int64 [B, n], padded on the right.
        lengths: lengths of the prompts, int64 [B].
        stretch: tokens of each prompt in one forward.
    """
    parts = []
    for begin in range(0, tokens.shape[1], stretch):
        part = tokens[:, begin : begin + stretch]  # [B, m]
        order = torch.arange(part.shape[1], device=tokens.device)  # [m]
        parts.append(target.forward(cache, part, order, causal(len(order), tokens.device)))
        cache.add((lengths - begin).clamp(0, len(order)), len(order))
    return _joined(parts)


def encode_many_in_stretches(
    target: FrozenTarget, caches: Sequence[TreeCache], tokens: Sequence[torch.Tensor], stretch: int
) -> list[TargetStates]:
    """Prefill prompts in chunks, each after the committed tokens of its cache, and commit them.

    Args:
        tokens: tokens of each prompt, int64 [1, n].
        stretch: tokens of each prompt in one forward.
    """
    parts: list[list[TargetStates]] = [[] for _ in tokens]
    for begin in range(0, max(one.shape[1] for one in tokens), stretch):
        rows = [i for i, one in enumerate(tokens) if begin < one.shape[1]]
        new = [tokens[i][:, begin : begin + stretch] for i in rows]  # [1, m] each
        orders = [torch.arange(one.shape[1], device=target.device) for one in new]  # [m] each
        seen = [causal(len(order), target.device) for order in orders]
        states = target.forward_many([caches[i] for i in rows], new, orders, seen)
        for i, order, found in zip(rows, orders, states):
            caches[i].add(torch.full_like(order[:1], len(order)), len(order))
            parts[i].append(found)
    return [_joined(found) for found in parts]


def _joined(parts: Sequence[TargetStates]) -> TargetStates:
    """Concatenate the states of chunks to those of the whole text."""
    if len(parts) == 1:
        return parts[0]
    return TargetStates(*(torch.cat(states, 1) for states in zip(*((x.tapped, x.final) for x in parts))))
