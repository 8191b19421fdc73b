"""Trees of drafted tokens in native calls: they have some dozens of nodes, and one of torch's operators takes
longer than all that is to be done with them.

Trees are given by their fields, as `TokenTree` has them: tokens, parents and depths, int64 [B, n],
log-probabilities, entropies and joint log-probabilities, fp32 [B, n], and ancestors, bool [B, n, n].
"""

import ctypes
from collections.abc import Sequence
from itertools import chain

import torch

from drafttrain.kernels.blocks import NativeBlocks
from drafttrain.kernels.build import library
from drafttrain.kernels.linear import KINDS, NativeLinear
from drafttrain.kernels.team import team_size


def is_native(like: torch.Tensor) -> bool:
    """Return whether there are native calls for tensors where this one is."""
    return like.device.type == "cpu" and library() is not None


def append_layer(
    fields: Sequence[torch.Tensor],
    above: torch.Tensor,
    tokens: torch.Tensor,
    log_probs: torch.Tensor,
    entropies: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Return the fields of trees with one more layer: its nodes' parents, tokens, log-probabilities and
    entropies (None: NaN), [B, f] each."""
    (batch, n), f = fields[0].shape, above.shape[1]
    layer = above, tokens, log_probs, entropies
    return _changed(library().append_layer, (batch, n, f), n + f, (*fields, *layer))


def take_nodes(fields: Sequence[torch.Tensor], nodes: torch.Tensor) -> list[torch.Tensor]:
    """Return the fields of trees of these nodes alone, int64 [B, w], ascending: the root first, and none
    without its parent."""
    (batch, n), w = fields[0].shape, nodes.shape[1]
    return _changed(library().take_nodes, (batch, n, w), w, (*fields, nodes))


def _changed(function, sizes: tuple, width: int, inputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor]:
    batch = sizes[0]
    whole = torch.empty(3, batch, width, dtype=torch.long)
    numbers = torch.empty(3, batch, width)
    seen = torch.empty(batch, width, width, dtype=torch.bool)
    held = [one if one is None else one.contiguous() for one in inputs]
    function(*sizes, *(one if one is None else one.data_ptr() for one in (*held, whole, numbers, seen)))
    return [*whole.unbind(), *numbers.unbind(), seen]


def follow_choices(
    fields: Sequence[torch.Tensor], choices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return what `TokenTree.follow` does."""
    batch, n = choices.shape
    held = [one.contiguous() for one in (choices, *fields[:3])]
    path, counts, after = torch.empty_like(held[1]), *torch.empty(2, batch, dtype=torch.long).unbind()
    pointers = (one.data_ptr() for one in (*held, path, counts, after))
    longest = library().follow_choices(batch, n, *pointers)
    return path[:, :longest], counts, after


def commit_slots(kv: torch.Tensor, lengths: torch.Tensor, path: torch.Tensor, counts: torch.Tensor) -> None:
    """Move the slots path [B, m] after the verified ones of each row, lengths [B], to the places right after
    those, the first counts[b] of them.

    Args:
        kv: [layers, 2, B, heads, max_len, dim], the first rows of a contiguous buffer.
    """
    held = [one.contiguous() for one in (lengths, path, counts)]
    _, plane, row, head, slot, _ = (kv.element_size() * stride for stride in kv.stride())
    planes, rows, heads = 2 * len(kv), kv.shape[2], kv.shape[3]
    at = [one.data_ptr() for one in held]
    sizes = (planes, plane, rows, row, heads, head, slot)
    library().commit_slots(kv.data_ptr(), *sizes, at[0], at[1], path.shape[1], at[2])


def draft_top(
    blocks: NativeBlocks,
    head: NativeLinear,
    embed: torch.Tensor,
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
        embed: inputs of tokens, [V, H].
        tree: tokens and depths, int64 [B, n], and ancestors, bool [B, n, n].
        caches: `KvCache.places`.
        dtype: of keys and values.
        reach: all positions are below it.
    """
    blocks.reach(reach)
    batch, f = frontier.shape
    values, places = torch.empty(batch, f, k), torch.empty(batch, f, k, dtype=torch.long)
    held = [one.contiguous() for one in (*tree, frontier)]
    library().draft_top(
        *(blocks.address, head.address, embed.data_ptr(), KINDS[embed.dtype]),
        *(batch, held[0].shape[1], f, *(one.data_ptr() for one in held)),
        *((ctypes.c_int64 * (4 * batch))(*chain.from_iterable(caches)), KINDS[dtype]),
        *(k, values.data_ptr(), places.data_ptr(), head.round_inputs, team_size()),
    )
    return values, places
