"""Two faster ways through a target's SDPA attention, with the results of the slow ones.

Packed rows: under an explicit mask SDPA computes what it masks, and most of a packed row's square is masked
(other documents, and the future). One causal call per document leaves all of that out. In bf16 on a CPU
plain matrix products are faster still for short documents, and as close to fp32 (docs/experiments.md).

Trees: with a mask and more than one query, transformers copies keys and values once for every query head that
shares them. Queries that share a key/value head can stand side by side instead.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

DOCUMENTS, SHARED_HEADS = "drafttrain_documents", "drafttrain_shared_heads"
SHORT = 320  # tokens; documents up to this length are faster by plain products in bf16 on a CPU
LONGEST = 256  # queries: beyond it the mask, repeated for each head of a group, costs more than the copies
Stretch = tuple[int, int, int, bool]  # row, first, last, whether each token is a document of its own


@dataclass
class _Packed:
    """What the attention function looks up: the stretches, and causal masks [group · n, n] by n."""

    stretches: list[Stretch]
    masks: dict[int, torch.Tensor] = field(default_factory=dict)


_packed: ContextVar[_Packed] = ContextVar("packed")


def is_plain_causal(config: PretrainedConfig) -> bool:
    """Whether this text config's attention is causal SDPA over all tokens, in every block."""
    full = all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or ())
    windowed = getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None)
    return config._attn_implementation == "sdpa" and full and not windowed


def causal_document_mask(document_start: torch.Tensor) -> torch.Tensor:
    """bool [B, T, T]: what each token of a packed row sees in the target (its own document up to itself)."""
    index = torch.arange(document_start.shape[1], device=document_start.device)
    return (index >= document_start[:, :, None]) & (index <= index[:, None])


def document_stretches(document_start: torch.Tensor) -> list[Stretch]:
    """The documents of packed rows [B, T] in order; neighbours of one token each (padding) are joined."""
    stretches: list[Stretch] = []
    for row, starts in enumerate(document_start.tolist()):
        bounds = [index for index, start in enumerate(starts) if index == start] + [len(starts)]
        for first, last in pairwise(bounds):
            alone = last - first == 1
            if alone and first > 0 and stretches[-1][3]:
                first = stretches.pop()[1]
            stretches.append((row, first, last, alone))
    return stretches


@contextmanager
def within_documents(config: PretrainedConfig, document_start: torch.Tensor) -> Iterator[None]:
    """Inside, a plain causal model of this config attends within the documents of [B, T]; give it no mask."""
    token = _packed.set(_Packed(document_stretches(document_start)))
    try:
        with _implementation(config, DOCUMENTS):
            yield
    finally:
        _packed.reset(token)


@contextmanager
def shared_heads(config: PretrainedConfig) -> Iterator[None]:
    """Inside, SDPA under explicit masks copies no keys and values; other implementations are left alone."""
    with _implementation(config, SHARED_HEADS if config._attn_implementation == "sdpa" else None):
        yield


@contextmanager
def _implementation(config: PretrainedConfig, name: str | None) -> Iterator[None]:
    before = config._attn_implementation
    config._attn_implementation = name or before
    try:
        yield
    finally:
        config._attn_implementation = before


def _attend_within_documents(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    is_causal: bool | None = None,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """As transformers' attention functions: q [B, h, T, d], k, v [B, kv, T, d] -> [B, T, h, d]."""
    parts, packed = [], _packed.get()
    plain = query.device.type == "cpu" and query.dtype == torch.bfloat16 and not _special(kwargs)
    for row, first, last, alone in packed.stretches:
        # documents of one token each are a batch of sequences, any other document is one sequence
        sequences = [x[row : row + 1, :, first:last] for x in (query, key, value)]  # [1, h, n, d]
        if alone:
            sequences = [x.transpose(0, 2) for x in sequences]  # [n, h, 1, d]
        if plain and not alone and last - first <= SHORT:
            parts.append(_plain_attention(*sequences, packed.masks, scaling))
            continue
        out = sdpa_attention_forward(module, *sequences, None, is_causal=True, scaling=scaling, **kwargs)[0]
        parts.append(out.transpose(0, 1) if alone else out)  # [1, n, h, d]
    return torch.cat(parts, 1).unflatten(1, (query.shape[0], query.shape[2]))[0], None  # [B, T, h, d]


def _plain_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    masks: dict[int, torch.Tensor],
    scale: float | None,
) -> torch.Tensor:
    """Causal attention of one sequence, q [1, h, n, d], k, v [1, kv, n, d] -> [1, n, h, d], two products."""
    (_, kv_heads, n, d), group = key.shape, query.shape[1] // key.shape[1]
    if n not in masks:
        hidden = torch.ones(n, n, dtype=torch.bool, device=key.device).triu(1)
        mask = torch.zeros(n, n, dtype=key.dtype, device=key.device).masked_fill_(hidden, float("-inf"))
        masks[n] = mask.repeat(group, 1)  # [group · n, n]
    packed = query[0].reshape(kv_heads, group * n, d)
    scale = d**-0.5 if scale is None else scale
    scores = torch.baddbmm(masks[n], packed, key[0].transpose(1, 2), alpha=scale)  # [kv, group · n, n]
    out = torch.bmm(scores.softmax(-1), value[0])  # [kv, group · n, d]
    return out.view(1, kv_heads * group, n, d).transpose(1, 2)


def _special(kwargs: dict) -> bool:
    """Whether an architecture asks for more than softmax attention."""
    return any(kwargs.get(name) is not None for name in ("position_bias", "softcap", "s_aux"))


def grouped_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scale: float | None = None,
) -> torch.Tensor:
    """SDPA with q [B, h, n, d] over k, v [B, kv, S, d] under a mask [B, 1, n, S] -> [B, n, h, d]."""
    kv_heads, n = key.shape[1], query.shape[2]
    group = query.shape[1] // kv_heads
    packed = query.unflatten(1, (kv_heads, group)).flatten(2, 3)  # [B, kv, group · n, d]
    mask = mask.repeat(1, 1, group, 1)  # [B, 1, group · n, S]
    out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scale)
    return out.unflatten(2, (group, n)).permute(0, 3, 1, 2, 4).flatten(2, 3)  # [B, n, kv · group, d]


def _attend_with_shared_heads(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    n = query.shape[2]
    alike = query.shape[1] == key.shape[1]  # multi-head attention: there is nothing to share
    if attention_mask is None or alike or _special(kwargs) or not 1 < n <= LONGEST:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    return grouped_attention(query, key, value, attention_mask, scaling), None


AttentionInterface.register(DOCUMENTS, _attend_within_documents)
AttentionInterface.register(SHARED_HEADS, _attend_with_shared_heads)
