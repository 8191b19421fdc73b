"""Random blocks and the dual-block attention mask of EDD (paper §3.1, Figure 3a, eq. 3).

A block imitates a drafting step: its first token is the root, whose hidden state the target has not computed
yet. Token q of a block sees the hidden states of positions *before* the block's start (the paper's h up to jL
would leak the root's own state) and the tokens of its block up to itself. Nothing crosses a document in a
packed row.
"""

from dataclasses import dataclass

import torch


@dataclass
class BlockLayout:
    """Row indices at which each token's document and block begin, int64 [B, T].

    Attributes:
        soft_prompts: whether keys are hidden states 0..T-1 and then tokens 0..T-1; else only tokens.
    """

    document_start: torch.Tensor
    block_start: torch.Tensor
    soft_prompts: bool = True


def whole_documents(document_start: torch.Tensor, first_token: bool) -> BlockLayout:
    """Return the layout of causal attention: each document of packed rows [B, T] is a block, no soft prompts.

    Args:
        first_token: whether tokens see the first token of their document; it always sees itself.
    """
    index = torch.arange(document_start.shape[1], device=document_start.device)
    start = document_start if first_token else torch.minimum(document_start + 1, index)
    return BlockLayout(document_start, start, soft_prompts=False)


def random_blocks(
    document_start: torch.Tensor, low: int, high: int, generator: torch.Generator
) -> BlockLayout:
    """Cut each packed row into blocks of one length; length and offset are drawn for each row.

    The first block of a row or of a document, and the last one, may be shorter.

    Args:
        document_start: row index at which each token's document begins [B, T].
        low, high: shortest and longest block, root included: a block of 10 has 9 drafts.
        generator: on the CPU.
    """
    batch, t = document_start.shape
    length = torch.randint(low, high + 1, (batch, 1), generator=generator)  # [B, 1]
    offset = (torch.rand(batch, 1, generator=generator) * length).long()  # [B, 1] in [0, length)
    index = torch.arange(t)
    start = (index - offset) // length * length + offset  # [B, T] the grid point at or before each token
    return BlockLayout(document_start, torch.maximum(start.to(document_start.device), document_start))
