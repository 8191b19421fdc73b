"""A drafting step in one native call: layers and head of a drafter at the nodes of trees."""

import ctypes
from collections.abc import Sequence
from itertools import chain

import torch

from drafttrain.kernels.blocks import NativeBlocks
from drafttrain.kernels.build import library
from drafttrain.kernels.linear import KINDS, NativeLinear
from drafttrain.kernels.team import team_size


class Inputs(ctypes.Structure):
    """The input of a drafter's layers at a token: its embedding, or joined with what its sequence carries,
    join(norm(embedding)) + offset.

    Args:
        embed: [V, H].
        join: a layer without bias; with it come the norm's weights, [H], and the offsets, [B, H].
    """

    _fields_ = [("embed", ctypes.c_void_p), ("kind", ctypes.c_int64), ("vocabulary", ctypes.c_int64)]
    _fields_ += [(name, ctypes.c_void_p) for name in ("join", "norm", "offsets")]
    _fields_ += [("round_inputs", ctypes.c_int64)]

    def __init__(
        self,
        embed: torch.Tensor,
        join: NativeLinear | None = None,
        norm: torch.Tensor | None = None,
        offsets: torch.Tensor | None = None,
    ):
        held = [embed, *(one.detach().float() for one in (norm, offsets) if one is not None)]
        self._held = join, *(one.contiguous() for one in held)
        embed_at, *numbers = (one.data_ptr() for one in self._held[1:])
        joined = () if join is None else (join.address, *numbers, join.round_inputs)
        super().__init__(embed_at, KINDS[embed.dtype], len(embed), *joined)


def draft_top(
    blocks: NativeBlocks,
    head: NativeLinear,
    inputs: Inputs,
    tree: Sequence[torch.Tensor],
    frontier: torch.Tensor,
    caches: Sequence[tuple[int, int, int, int]],
    dtype: torch.dtype,
    k: int,
    reach: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and numbers of the k most probable outputs, [B, f, k], of a drafter's layers
    and head after the nodes frontier [B, f], whose keys and values go into their slots.

    Args:
        inputs: what the layers read at a token.
        tree: tokens and depths, int64 [B, n], and ancestors, bool [B, n, n].
        caches: `KvCache.places`.
        dtype: of keys and values.
        reach: all positions are below it.
    """
    if not 1 <= k <= head.out_features:  # the library would read beyond its buffers
        raise ValueError(f"k: must be in 1..{head.out_features}, got {k}")
    blocks.reach(reach)
    batch, f = frontier.shape
    values = torch.empty(batch, f, k, dtype=torch.float)
    numbers = torch.empty(batch, f, k, dtype=torch.long)
    held = [one.contiguous() for one in (*tree, frontier)]
    nodes = (one.data_ptr() for one in held)
    failed = library().draft_top(
        *(blocks.address, head.address, ctypes.addressof(inputs)),
        *(batch, held[0].shape[1], f, *nodes, numbers_of(caches), KINDS[dtype]),
        *(k, values.data_ptr(), numbers.data_ptr(), blocks.round_inputs, head.round_inputs, team_size()),
    )
    if failed:
        raise IndexError(f"tokens: must be in 0..{inputs.vocabulary - 1}, got {tree[0].tolist()}")
    return values, numbers


def numbers_of(rows: Sequence[tuple[int, ...]]) -> ctypes.Array:
    """Return the numbers of all rows, for the library."""
    return (ctypes.c_int64 * sum(map(len, rows)))(*chain.from_iterable(rows))
