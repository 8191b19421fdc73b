"""Attention with a block mask: SDPA with an explicit mask on CPU, flex-attention on GPU."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from drafttrain.training.masks import BlockLayout

STRETCH = 96  # queries per call; with fewer, calls cost more than they save in attention
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def block_attention(layout: BlockLayout, implementation: str = "auto") -> Attend:
    """Return `attend(q [B, h, T, d], k, v [B, kv, 2T, d]) -> [B, h, T, d]` with the layout's mask; k and v
    are [B, kv, T, d] without soft prompts.

    Args:
        implementation: "sdpa", "flex", or "auto" (flex on CUDA; flex-attention has no backward pass on CPU).
    """
    if implementation == "auto":
        implementation = "flex" if layout.block_start.is_cuda else "sdpa"
    if implementation == "sdpa":
        return _sdpa(layout)
    from drafttrain.training.flex import flex_attend  # for GPUs

    return flex_attend(layout)


def _sdpa(layout: BlockLayout) -> Attend:
    """Return SDPA over stretches of queries, each with only the keys that any of them sees: most of the full
    mask is empty, and SDPA on a CPU computes masked scores too."""
    t = layout.block_start.shape[1]
    index, stretches = torch.arange(t, device=layout.block_start.device), []
    for row, (documents, blocks) in enumerate(zip(layout.document_start, layout.block_start)):
        for first in range(0, t, STRETCH):
            last = min(first + STRETCH, t)
            hidden = slice(int(documents[first]), int(blocks[last - 1]))
            if not layout.soft_prompts:
                hidden = slice(0, 0)
            tokens = slice(int(blocks[first]), last)
            document, block = documents[first:last, None], blocks[first:last, None]  # [queries, 1]
            seen_hidden = (index[hidden] >= document) & (index[hidden] < block)  # [queries, hidden keys]
            seen_tokens = (index[tokens] >= block) & (index[tokens] <= index[first:last, None])
            mask = torch.cat((seen_hidden, seen_tokens), -1)[None, None]
            if layout.soft_prompts:  # token keys follow t hidden-state keys
                tokens = slice(t + tokens.start, t + tokens.stop)
            stretches.append(_Stretch(row, slice(first, last), hidden, tokens, mask))
    return lambda q, k, v: _Stretches.apply(q, k, v, stretches)


@dataclass
class _Stretch:
    """Queries of a row, the keys they attend to, and their mask [1, 1, queries, keys]."""

    row: int
    queries: slice
    hidden: slice
    tokens: slice
    mask: torch.Tensor


class _Stretches(torch.autograd.Function):
    """Attention of each stretch separately. Autograd over the slices would allocate a gradient of the size of
    all keys for each of them, so gradients are written in place here."""

    @staticmethod
    def forward(ctx, q, k, v, stretches):
        out = torch.empty_like(q)
        ctx.graphs = []
        needed = any(ctx.needs_input_grad)
        for s in stretches:
            queries = q[s.row, :, s.queries].detach()[None]  # [1, h, n, d]
            keys, values = (
                torch.cat((x[s.row, :, s.hidden], x[s.row, :, s.tokens]), 1)[None] for x in (k, v)
            )
            leaves = [x.detach().requires_grad_(needed) for x in (queries, keys, values)]
            with torch.set_grad_enabled(needed):
                attended = F.scaled_dot_product_attention(*leaves, attn_mask=s.mask, enable_gqa=True)
            out[s.row, :, s.queries] = attended.detach()[0]
            if needed:
                ctx.graphs.append((s, leaves, attended))
        ctx.shapes, ctx.like = [x.shape for x in (q, k, v)], q.detach()[:0]
        return out

    @staticmethod
    def backward(ctx, grad_out):
        grads = [ctx.like.new_zeros(shape) for shape in ctx.shapes]
        for s, leaves, attended in ctx.graphs:
            parts = torch.autograd.grad(attended, leaves, grad_out[s.row, :, s.queries][None])
            grads[0][s.row, :, s.queries] = parts[0][0]
            for grad, part in zip(grads[1:], parts[1:]):  # [1, kv, keys, d]
                n_hidden = s.hidden.stop - s.hidden.start
                grad[s.row, :, s.hidden] += part[0, :, :n_hidden]
                grad[s.row, :, s.tokens] += part[0, :, n_hidden:]
        ctx.graphs = None
        return *grads, None
