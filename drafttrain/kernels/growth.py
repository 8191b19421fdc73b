"""Growth of whole trees in one native call, drafting steps included."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from drafttrain.kernels.blocks import NativeBlocks
from drafttrain.kernels.build import library
from drafttrain.kernels.drafting import Drafting, Inputs, Places
from drafttrain.kernels.linear import NativeLinear

# what the library returns in place of a number of nodes; FULL - n where there is no room for n
OUTSIDE, ORPHANS, LARGE, FULL = -1, -2, -3, -4
ROOM = 512  # nodes that results have room for at first
DEEPEST = 128  # layers of a tree at most


@dataclass(frozen=True)
class Parts:
    """A drafter with the state of the sequences that it drafts for.

    Attributes:
        blocks, head: its layers and its head.
        inputs: what its layers read at a token.
        to_target: the target's ids of the draft vocabulary, int64 [D].
        state: KV cache of the sequences, which grows with their trees.
    """

    blocks: NativeBlocks
    head: NativeLinear
    inputs: Inputs
    to_target: torch.Tensor
    state: Places

    def call(self, name: str, root: torch.Tensor, slots: int, *given: object) -> int:
        """Call a function of the library for root tokens, int64 [B], with this many KV slots reserved per
        tree; return its result: a number of nodes, LARGE, or FULL - n.

        Raises:
            IndexError: a token is not in the vocabulary.
            ValueError: a node would be verified without its parent.
        """
        root = root.contiguous()
        self.blocks.reach(self.state.reserve(slots) + DEEPEST)
        drafting = Drafting(self.blocks, self.head, self.inputs, self.state, self.to_target)
        given = (one.data_ptr() if isinstance(one, torch.Tensor) else one for one in given)
        found = getattr(library(), name)(ctypes.addressof(drafting), len(root), root.data_ptr(), *given)
        if found == OUTSIDE:
            raise IndexError(
                f"tokens: must be in 0..{self.inputs.vocabulary - 1}, got {root.tolist()} or drafts of them"
            )
        if found == ORPHANS:
            raise ValueError("promise: must not fall, got a node that is more probable than its parent")
        return found

    def grow(self, name: str, root: torch.Tensor, *given: object) -> list[torch.Tensor] | None:
        """Return the fields of the trees that a function of the library grows; None if they are too large.

        It starts with little room and is called again if that is full: few trees are large, and KV caches
        should not grow for those that might be.
        """
        batch, slots, room = len(root), 1, ROOM
        while True:
            whole = torch.empty(3 * batch * room, dtype=torch.long)
            numbers = torch.empty(3 * batch * room, dtype=torch.float)
            seen = torch.empty(batch * room * room, dtype=torch.bool)
            width = self.call(name, root, slots, *given, room, whole, numbers, seen)
            if width > 0:
                trees = (one[: 3 * batch * width].view(3, batch, width) for one in (whole, numbers))
                ancestors = seen[: batch * width * width].view(batch, width, width)
                return [*chain.from_iterable(trees), ancestors]
            if width == LARGE:
                return None
            slots, room = FULL - width, max(room, FULL - width)


class _Curve(ctypes.Structure):
    _fields_ = [("n", ctypes.c_int64), ("x", ctypes.c_void_p), ("y", ctypes.c_void_p)]


class Timing(ctypes.Structure):
    """Settings of `TimedPolicy` for `grow_timed`; curves are given by their points (x ascending, y)."""

    _fields_ = [
        *((name, _Curve) for name in ("draft", "verify", "promise")),
        ("acceptance", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("depths", "width", "frontier", "max_depth")),
    ]

    def __init__(
        self, curves: Sequence[Sequence[Sequence[float]]], acceptance: Sequence[float], *limits: int
    ):
        points = [torch.tensor(curve, dtype=torch.double) for curve in (*curves, [acceptance])]
        self._held = points  # [2, points] each, and [1, depths]
        found = [_Curve(one.shape[1], one[0].data_ptr(), one[-1].data_ptr()) for one in points]
        super().__init__(*found[:3], found[3].x, found[3].n, *limits)


def grow_timed(parts: Parts, root: torch.Tensor, timing: Timing, rate: float) -> list[torch.Tensor] | None:
    """Return the fields of the trees of `TimedPolicy.grow` for root tokens, int64 [B]; None if they are too
    large.

    Args:
        timing: settings of the policy; their width must be at most D.
        rate: tokens that a second has to yield.
    """
    return parts.grow("grow_timed", root, ctypes.addressof(timing), rate)


def grow_best(
    parts: Parts,
    root: torch.Tensor,
    width: int,
    frontier: int,
    max_depth: int,
    total: int,
    least: float = 0.0,
    kept: float = 0.0,
) -> list[torch.Tensor] | None:
    """Return the fields of trees of the most probable nodes for root tokens, int64 [B]; None if they are too
    large.

    Args:
        width: children of an expanded node, at most D.
        frontier: number of nodes of a layer that are expanded, the most probable ones.
        total: number of nodes that are kept in the end, the most probable ones, root excluded.
        least, kept: least joint probabilities of an expanded node, and of one that is kept; above 0 for a
            single tree only.
    """
    return parts.grow("grow_best", root, width, frontier, max_depth, total, least, kept)


def grow_drawn(
    parts: Parts,
    root: torch.Tensor,
    k_config: Sequence[int],
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    size: int,
    temperature: float,
    threshold: float,
    seeds: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw the trees of `SampledTreePolicy` from root tokens, int64 [B].

    Args:
        k_config: children of a node, layer by layer, at most `size`.
        depths, ancestors: of the n nodes of a tree without threshold, int64 [n] and bool [n, n].
        size: number of most probable tokens that children are drawn from, K; at most D.
        threshold: least joint probability of a node that gets children; 0: all nodes get some.
        seeds: of each tree, within 64 bits.

    Returns:
        tokens, log-probabilities and which nodes exist, bool, [B, n], and the probabilities and ids of
        the K tokens that the children of each node are drawn from, [B, n, K]; zeros elsewhere.
    """
    batch, n = len(root), len(depths)
    if len(seeds) != batch:
        raise ValueError(f"seeds: must be one for each of {batch} trees, got {len(seeds)}")
    if max(k_config) > size:  # the library would read beyond its buffers
        raise ValueError(f"k_config: must be at most {size}, the tokens drawn from, got {max(k_config)}")
    tokens, log_probs = (torch.zeros(batch, n, dtype=dtype) for dtype in (torch.long, torch.float))
    kept = torch.zeros(batch, n, dtype=torch.bool)
    probs, ids = (torch.zeros(batch, n, size, dtype=dtype) for dtype in (torch.float, torch.long))
    branching = (ctypes.c_int64 * len(k_config))(*k_config)
    draws = branching, len(k_config), size, temperature, threshold, (ctypes.c_uint64 * batch)(*seeds)
    shape = depths.contiguous(), ancestors.contiguous()
    last = math.prod(k_config)  # nodes of the last layer, which the drafter does not read
    parts.call("grow_drawn", root, n - last, *draws, n, *shape, tokens, log_probs, kept, probs, ids)
    return tokens, log_probs, kept, probs, ids
