"""Native operations on trees of draft tokens: these have some dozens of nodes, and one operator of torch
takes longer than all the work on them.

Trees are given by their fields, as `TokenTree` has them: tokens, parents and depths, int64 [B, n],
log-probabilities, entropies and joint log-probabilities, fp32 [B, n], and ancestors, bool [B, n, n].
"""

from collections.abc import Callable, Sequence

import torch

from drafttrain.kernels.build import library


def is_native(like: torch.Tensor) -> bool:
    """Return whether native calls can be used for tensors on the device of this one."""
    return like.device.type == "cpu" and library() is not None


def append_layer(
    fields: Sequence[torch.Tensor],
    above: torch.Tensor,
    tokens: torch.Tensor,
    log_probs: torch.Tensor,
    entropies: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Return the fields of trees with one more layer, given the parents (`above`), tokens, log-probabilities
    and entropies (None: NaN) of its nodes, [B, f] each."""
    n, f = fields[0].shape[1], above.shape[1]
    scores = log_probs.float(), None if entropies is None else entropies.float()
    return _changed(library().append_layer, f, n + f, fields, (above.long(), tokens.long(), *scores))[0]


def take_nodes(fields: Sequence[torch.Tensor], nodes: torch.Tensor) -> list[torch.Tensor]:
    """Return the fields of the sub-trees of these nodes, int64 [B, w], ascending.

    Raises:
        ValueError: they lack the root or the parent of a node.
    """
    found, orphans = _changed(library().take_nodes, nodes.shape[1], nodes.shape[1], fields, (nodes,))
    if orphans:
        raise ValueError(f"nodes: must be the root and then none without its parent, got {nodes.tolist()}")
    return found


def _changed(
    function: Callable,
    count: int,
    width: int,
    fields: Sequence[torch.Tensor],
    given: Sequence[torch.Tensor | None],
) -> tuple[list[torch.Tensor], int | None]:
    """Call a native function that makes trees of this width from the fields of others and from tensors for
    `count` nodes, `given`; return the new fields and its result."""
    batch, n = fields[0].shape
    whole = torch.empty(3, batch, width, dtype=torch.long)
    numbers = torch.empty(3, batch, width, dtype=torch.float)
    seen = torch.empty(batch, width, width, dtype=torch.bool)
    old = *(one.long() for one in fields[:3]), *(one.float() for one in fields[3:6]), fields[6]
    held = [one if one is None else one.contiguous() for one in (*old, *given, whole, numbers, seen)]
    result = function(batch, n, count, *(one if one is None else one.data_ptr() for one in held))
    return [*whole.unbind(), *numbers.unbind(), seen], result


def follow_choices(
    tokens: torch.Tensor, parents: torch.Tensor, depths: torch.Tensor, choices: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the longest path of choices in each row, as `TokenTree.follow` does."""
    batch, n = choices.shape
    held = [one.contiguous() for one in (choices, tokens, parents, depths)]
    path, counts, after = (torch.empty(size, dtype=torch.long) for size in ((batch, n), batch, batch))
    pointers = (one.data_ptr() for one in (*held, path, counts, after))
    longest = library().follow_choices(batch, n, *pointers)
    return path[:, :longest], counts, after


def commit_slots(kv: torch.Tensor, lengths: torch.Tensor, path: torch.Tensor, counts: torch.Tensor) -> None:
    """Commit the first counts[b] nodes of path [B, m] in each row: move their slots, lengths[b] + path, to
    those right after the lengths[b] verified slots.

    Args:
        kv: [layers, 2, B, heads, max_len, dim], the first rows of a contiguous buffer.
    """
    held = [one.contiguous() for one in (lengths, path, counts)]
    _, plane, row, head, slot, _ = (kv.element_size() * stride for stride in kv.stride())
    sizes = 2 * len(kv), plane, kv.shape[2], row, kv.shape[3], head, slot
    verified, nodes, kept = (one.data_ptr() for one in held)
    library().commit_slots(kv.data_ptr(), *sizes, verified, nodes, path.shape[1], kept)
