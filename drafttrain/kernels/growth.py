"""Growth of trees in one native call, drafting steps included, with drafters that read tokens alone."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch

from drafttrain.kernels.blocks import NativeBlocks
from drafttrain.kernels.build import library
from drafttrain.kernels.linear import KINDS, NativeLinear
from drafttrain.kernels.team import team_size
from drafttrain.kernels.trees import numbers_of

OUTSIDE, ORPHANS, FULL = -1, -2, -3  # what the library returns; FULL - n where drafts need n slots


class Places(Protocol):
    """Keys and values of the sequences that are drafted for: a `KvCache`, or several joined."""

    dtype: torch.dtype

    def reserve(self, n: int) -> int:
        """Make room for n slots after each row's verified ones; return how many slots are then in view."""

    def places(self) -> list[tuple[int, int, int, int]]:
        """Return where the rows' keys and values are."""


@dataclass(frozen=True)
class Parts:
    """A drafter with the state of the sequences that it drafts for.

    Attributes:
        blocks, head: its layers and its head.
        embed: inputs of tokens, [V, H].
        to_target: the target's ids of the draft vocabulary, int64 [D].
    """

    blocks: NativeBlocks
    head: NativeLinear
    embed: torch.Tensor
    to_target: torch.Tensor
    state: Places

    def grow(self, name: str, root: torch.Tensor, most: int, *given: object) -> int:
        """Call a function of the library for root tokens, int64 [B], and trees of `most` nodes at most. Where
        drafts need more slots than there are, it is called again with more. Return what it does.

        Raises:
            IndexError: a token is not in the vocabulary.
            ValueError: a node would be verified without its parent.
        """
        embed, to_target, root = (one.contiguous() for one in (self.embed, self.to_target, root))
        found, slots = FULL, 1  # few trees are large, and caches should not grow for those that might be
        while found <= FULL:
            slots = max(slots, FULL - found)
            self.blocks.reach(self.state.reserve(slots) + most)
            found = getattr(library(), name)(
                *(self.blocks.address, self.head.address, embed.data_ptr(), KINDS[embed.dtype], len(embed)),
                *(to_target.data_ptr(), numbers_of(self.state.places()), KINDS[self.state.dtype]),
                *(self.blocks.round_inputs, self.head.round_inputs, team_size(), len(root), root.data_ptr()),
                *(one.data_ptr() if isinstance(one, torch.Tensor) else one for one in given),
            )
        if found == OUTSIDE:
            raise IndexError(f"tokens: must be in 0..{len(embed) - 1}, got {root.tolist()} or drafts of them")
        if found == ORPHANS:
            raise ValueError("promise: must not fall, got a node that is more probable than its parent")
        return found


class _Curve(ctypes.Structure):
    _fields_ = [("n", ctypes.c_int64), ("x", ctypes.c_void_p), ("y", ctypes.c_void_p)]


class Timing(ctypes.Structure):
    """Settings of `TimedPolicy` that `grow_timed` decides by; curves by their points (x ascending, y).

    Attributes:
        most: nodes of a row at most, all that are grown counted.
    """

    _fields_ = [
        *((name, _Curve) for name in ("draft", "verify", "promise")),
        ("acceptance", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("depths", "width", "frontier", "max_depth", "most")),
    ]

    def __init__(
        self,
        curves: Sequence[Sequence[Sequence[float]]],
        acceptance: Sequence[float],
        width: int,
        frontier: int,
        max_depth: int,
    ):
        points = [torch.tensor(curve, dtype=torch.double) for curve in (*curves, [acceptance])]
        self._held = points  # [2, points] each, and [1, depths]
        layer, most = 1, 1
        for _ in range(max_depth):
            layer = min(layer, frontier) * width
            most += layer
        found = [_Curve(one.shape[1], one[0].data_ptr(), one[-1].data_ptr()) for one in points]
        super().__init__(*found[:3], found[3].x, found[3].n, width, frontier, max_depth, most)


def grow_timed(parts: Parts, root: torch.Tensor, timing: Timing, rate: float) -> list[torch.Tensor]:
    """Return the fields of trees as `TimedPolicy.grow` grows them from root tokens, int64 [B].

    Args:
        timing: its width is at most D.
        rate: tokens that a second has to yield.
    """
    batch, most = len(root), timing.most
    whole = torch.empty(3 * batch * most, dtype=torch.long)
    numbers = torch.empty(3 * batch * most, dtype=torch.float)
    seen = torch.empty(batch * most * most, dtype=torch.bool)
    width = parts.grow("grow_timed", root, most, ctypes.addressof(timing), rate, whole, numbers, seen)
    trees = (one[: 3 * batch * width].view(3, batch, width) for one in (whole, numbers))
    return [*chain.from_iterable(trees), seen[: batch * width * width].view(batch, width, width)]


def grow_drawn(
    parts: Parts,
    root: torch.Tensor,
    k_config: Sequence[int],
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    size: int,
    temperature: float,
    seeds: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw the trees of `SampledTreePolicy` from root tokens, int64 [B], where all nodes get children.

    Args:
        k_config: children of a node, layer by layer, at most `size`.
        depths, ancestors: of the n nodes, int64 [n] and bool [n, n].
        size: most probable tokens that children are drawn from, K; at most D.
        seeds: of each tree, within 64 bits.

    Returns:
        tokens and log-probabilities, [B, n], and the probabilities and ids of the K tokens that the children
        of each node are drawn from, [B, n, K]; zeros of nodes without children.
    """
    batch, n = len(root), len(depths)
    tokens, log_probs = torch.empty(batch, n, dtype=torch.long), torch.empty(batch, n)
    probs, ids = torch.zeros(batch, n, size), torch.zeros(batch, n, size, dtype=torch.long)
    branching = (ctypes.c_int64 * len(k_config))(*k_config)
    draws = branching, len(k_config), size, temperature, (ctypes.c_uint64 * batch)(*seeds)
    shape = depths.contiguous(), ancestors.contiguous()
    parts.grow("grow_drawn", root, n, *draws, n, *shape, tokens, log_probs, probs, ids)
    return tokens, log_probs, probs, ids
