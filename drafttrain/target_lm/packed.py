"""Forward of a target over packed rows with several documents each, for training and collection."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from drafttrain.target_lm.attention import (
    IGNORED,
    Packed,
    Stretch,
    attends_within_documents,
    packed_rows,
)
from drafttrain.target_lm.stock_masks import attention_mask

CPU_TOKENS = 1024  # in one forward over packed rows: with more, activations do not fit into the CPU's cache


def run_packed(
    base: PreTrainedModel, config: PreTrainedConfig, input_ids: torch.Tensor, document_start: torch.Tensor
) -> torch.Tensor:
    """Return the last hidden states [B, T, H] of packed rows [B, T], of a language model without its head.

    Args:
        config: its text config.
        document_start: index in its row at which each token's document begins [B, T]; a token sees its own
            document up to itself.
    """
    index = torch.arange(input_ids.shape[1], device=input_ids.device)
    positions = index - document_start  # [B, T] within each token's document
    inputs = {"input_ids": input_ids, "position_ids": positions, "use_cache": False}
    if not document_start.any():
        out = base(**inputs)
    elif input_ids.device.type == "cpu" and attends_within_documents(config):
        with within_documents(document_start):
            out = base(attention_mask=IGNORED, **inputs)
    else:
        allowed = causal_document_mask(document_start)  # [B, T, T]
        mask = attention_mask(allowed, positions, positions, config, base.dtype)
        out = base(attention_mask=mask, **inputs)
    return out.last_hidden_state


def causal_document_mask(document_start: torch.Tensor) -> torch.Tensor:
    """Return which tokens each token of a packed row sees, bool [B, T, T]: its own document up to itself."""
    index = torch.arange(document_start.shape[1], device=document_start.device)
    return (index >= document_start[:, :, None]) & (index <= index[:, None])


def document_stretches(document_start: torch.Tensor) -> list[Stretch]:
    """Return the documents of packed rows [B, T] in order; adjacent one-token ones (padding) are joined."""
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
def within_documents(document_start: torch.Tensor) -> Iterator[None]:
    """Make models for which `attends_within_documents` holds attend within the documents of [B, T] and ignore
    the mask that they get, inside the block and in this thread."""
    token = packed_rows.set(Packed(document_stretches(document_start)))
    try:
        yield
    finally:
        packed_rows.reset(token)
