"""Attention under a block mask: SDPA with an explicit mask on CPU, flex-attention on GPU."""

from collections.abc import Callable
from functools import lru_cache

import torch
import torch.nn.functional as F

from drafttrain.training.masks import BlockLayout

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def block_attention(layout: BlockLayout, implementation: str = "auto") -> Attend:
    """`attend(q [B, h, T, d], k, v [B, kv, 2T, d]) -> [B, h, T, d]` under the layout's mask.

    Args:
        implementation: "sdpa", "flex", or "auto" (flex on CUDA; flex-attention has no backward pass on CPU).
    """
    if implementation == "auto":
        implementation = "flex" if layout.block_start.is_cuda else "sdpa"
    return _flex(layout) if implementation == "flex" else _sdpa(layout)


def _sdpa(layout: BlockLayout) -> Attend:
    mask = layout.dense_mask()  # [B, 1, T, 2T]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

    return attend


@lru_cache(maxsize=1)
def _compiled_flex() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _flex(layout: BlockLayout) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    batch, t = layout.block_start.shape
    device = layout.block_start.device
    mask = create_block_mask(layout.mask_mod(), batch, None, t, 2 * t, device=device)
    run = _compiled_flex() if device.type == "cuda" else flex_attention

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return run(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])

    return attend
