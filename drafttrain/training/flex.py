"""Attention with a block mask by flex-attention, for GPUs: it has no backward pass on CPU."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from drafttrain.training.masks import BlockLayout


def flex_attend(layout: BlockLayout) -> Callable[..., torch.Tensor]:
    """Return `attend` of `block_attention` under the layout's mask."""
    batch, t = layout.block_start.shape
    device = layout.block_start.device
    keys = 2 * t if layout.soft_prompts else t
    mask = create_block_mask(mask_mod(layout), batch, None, t, keys, device=device)
    run = _compiled() if device.type == "cuda" else flex_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return run(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    return attend


@lru_cache(maxsize=1)
def _compiled() -> Callable:
    return torch.compile(flex_attention, dynamic=False)


def mask_mod(layout: BlockLayout) -> Callable[..., torch.Tensor]:
    """Return flex-attention's mask function of batch, head, query and key index (see `BlockLayout` for the
    keys)."""
    document_start, block_start = layout.document_start, layout.block_start
    t = block_start.shape[1]

    def own_block(b, h, q, kv):
        return (kv >= block_start[b, q]) & (kv <= q)

    def allowed(b, h, q, kv):
        block = block_start[b, q]
        hidden = (kv < t) & (kv >= document_start[b, q]) & (kv < block)
        tokens = (kv >= t + block) & (kv <= t + q)
        return hidden | tokens

    return allowed if layout.soft_prompts else own_block
