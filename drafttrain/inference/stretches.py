"""Chunked prefill of long prompts: the mask of a whole prompt grows with the square of its length."""

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
    return TargetStates(*(torch.cat(states, 1) for states in zip(*((x.tapped, x.final) for x in parts))))
