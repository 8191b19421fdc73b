"""A drafting step in one native call: layers and head of a drafter at the nodes of trees."""

import ctypes
from collections.abc import Sequence

import torch

from drafttrain.kernels.blocks import NativeBlocks
from drafttrain.kernels.build import library
from drafttrain.kernels.drafting import Drafting, Inputs, Places
from drafttrain.kernels.linear import NativeLinear


def draft_top(
    blocks: NativeBlocks,
    head: NativeLinear,
    inputs: Inputs,
    state: Places,
    tree: Sequence[torch.Tensor],
    frontier: torch.Tensor,
    k: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a drafter's layers and head at the nodes frontier [B, f], and write their keys and values to their
    slots; return log-probabilities and indices of the k most probable outputs, [B, f, k].

    Args:
        inputs: inputs of the layers at a token, without `own_states`.
        tree: tokens and depths, int64 [B, n], and ancestors, bool [B, n, n].
    """
    if not 1 <= k <= head.out_features:  # the library would read beyond its buffers
        raise ValueError(f"k: must be in 1..{head.out_features}, got {k}")
    if inputs.own_states:  # these are only known during native growth
        raise ValueError("inputs: must be without own_states")
    (batch, f), n = frontier.shape, tree[0].shape[1]
    blocks.reach(state.reserve(n))
    values = torch.empty(batch, f, k, dtype=torch.float)
    numbers = torch.empty(batch, f, k, dtype=torch.long)
    held = [one.contiguous() for one in (*tree, frontier)]
    nodes, drafting = (one.data_ptr() for one in held), Drafting(blocks, head, inputs, state)
    found = values.data_ptr(), numbers.data_ptr()
    if library().draft_top(ctypes.addressof(drafting), batch, n, f, *nodes, k, *found):
        raise IndexError(f"tokens: must be in 0..{inputs.vocabulary - 1}, got {tree[0].tolist()}")
    return values, numbers
