"""Attention under a block mask: SDPA with an explicit mask on CPU, flex-attention on GPU."""

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F

from drafttrain.training.masks import BlockLayout

SHORTEST_STRETCH = 64  # tokens; below it the calls cost more than the attention they save
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
    """One SDPA call for each stretch of whole documents: in a packed row most of the full mask is empty, and
    SDPA on a CPU computes what it masks."""
    t = layout.block_start.shape[1]
    mask = layout.dense_mask()  # [B, 1, T, 2T]
    stretches = []
    for row, starts in enumerate(layout.document_start.tolist()):
        for first, last in document_stretches(starts):
            both = torch.cat(
                (mask[row, :, first:last, first:last], mask[row, :, first:last, t + first : t + last]), -1
            )
            stretches.append((row, first, last, both))  # both [1, n, 2n]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = []
        for row, first, last, both in stretches:
            keys, values = (
                torch.cat((x[row, :, first:last], x[row, :, t + first : t + last]), 1) for x in (k, v)
            )  # [kv, 2n, d]
            parts.append(
                F.scaled_dot_product_attention(
                    q[row : row + 1, :, first:last],
                    keys[None],
                    values[None],
                    attn_mask=both[None],
                    enable_gqa=True,
                )[0]
            )  # [h, n, d]
        together = torch.cat(parts, 1)  # [h, B * T, d]
        return together.unflatten(1, (-1, t)).transpose(0, 1)  # [B, h, T, d]

    return attend


def document_stretches(starts: list[int], shortest: int = SHORTEST_STRETCH) -> Iterator[tuple[int, int]]:
    """Cuts a row into stretches of whole documents, none but the last shorter than `shortest` tokens.

    Args:
        starts: row index at which each token's document begins.
    """
    first = 0
    for index, start in enumerate(starts):
        if index == start and index - first >= shortest:
            yield first, index
            first = index
    yield first, len(starts)


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
