"""Causal attention within each document of packed rows, for targets that attend with SDPA.

Under an explicit mask SDPA computes what it masks, and most of a packed row's square is masked: other
documents, and the future. One causal call per document leaves all of that out.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import pairwise

import torch
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "drafttrain_documents"
Stretch = tuple[int, int, int, bool]  # row, first, last, whether each token is a document of its own
_stretches: ContextVar[list[Stretch]] = ContextVar("stretches")  # for the attention function to look up


def usable(config: PretrainedConfig) -> bool:
    """Whether this text config's attention is plain causal SDPA in every block."""
    plain = all(kind == "full_attention" for kind in getattr(config, "layer_types", None) or ())
    windowed = getattr(config, "sliding_window", None) and not getattr(config, "layer_types", None)
    return config._attn_implementation == "sdpa" and plain and not windowed


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
def attention_within_documents(config: PretrainedConfig, document_start: torch.Tensor) -> Iterator[None]:
    """Inside, a model of this config attends within the documents of [B, T] when it gets no mask."""
    token = _stretches.set(document_stretches(document_start))
    before = config._attn_implementation
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before
        _stretches.reset(token)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    is_causal: bool | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    """As transformers' attention functions: q [B, h, T, d], k, v [B, kv, T, d] -> [B, T, h, d]."""
    parts = []
    for row, first, last, alone in _stretches.get():
        # documents of one token each are a batch of sequences, any other document is one sequence
        sequences = [x[row : row + 1, :, first:last] for x in (query, key, value)]  # [1, h, n, d]
        if alone:
            sequences = [x.transpose(0, 2) for x in sequences]  # [n, h, 1, d]
        out = sdpa_attention_forward(module, *sequences, None, is_causal=True, **kwargs)[0]
        parts.append(out.transpose(0, 1) if alone else out)  # [1, n, h, d]
    return torch.cat(parts, 1).unflatten(1, (query.shape[0], query.shape[2]))[0], None  # [B, T, h, d]


AttentionInterface.register(NAME, _attention)
