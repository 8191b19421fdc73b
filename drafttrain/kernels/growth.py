"""Growth of the trees of `timed` in one native call: drafting steps, what to expand and what to verify."""

import ctypes
from collections.abc import Sequence
from itertools import chain

import torch

from drafttrain.kernels.blocks import NativeBlocks
from drafttrain.kernels.build import library
from drafttrain.kernels.linear import KINDS, NativeLinear
from drafttrain.kernels.team import team_size
from drafttrain.kernels.trees import numbers_of


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


def grow_timed(
    blocks: NativeBlocks,
    head: NativeLinear,
    embed: torch.Tensor,
    to_target: torch.Tensor,
    root: torch.Tensor,
    caches: Sequence[tuple[int, int, int, int]],
    dtype: torch.dtype,
    timing: Timing,
    rate: float,
    reach: int,
) -> list[torch.Tensor]:
    """Return the fields of trees as `TimedPolicy.grow` grows them from root tokens, int64 [B], with a drafter
    that reads tokens alone; arguments as `trees.draft_top`.

    Args:
        to_target: the target's ids of the draft vocabulary, int64 [D]; `timing.width` is at most D.
        rate: tokens that a second has to yield.
    """
    blocks.reach(reach)
    batch, most = len(root), timing.most
    whole = torch.empty(3 * batch * most, dtype=torch.long)
    numbers = torch.empty(3 * batch * most, dtype=torch.float)
    seen = torch.empty(batch * most * most, dtype=torch.bool)
    embed, to_target, root = (one.contiguous() for one in (embed, to_target, root))
    width = library().grow_timed(
        *(blocks.address, head.address, embed.data_ptr(), KINDS[embed.dtype], len(embed)),
        *(to_target.data_ptr(), ctypes.addressof(timing), rate),
        *(batch, root.data_ptr(), numbers_of(caches), KINDS[dtype]),
        *(whole.data_ptr(), numbers.data_ptr(), seen.data_ptr()),
        *(blocks.round_inputs, head.round_inputs, team_size()),
    )
    if width < 0:
        raise IndexError(f"tokens: must be in 0..{len(embed) - 1}, got {root.tolist()} or drafts after it")
    trees = (one[: 3 * batch * width].view(3, batch, width) for one in (whole, numbers))
    return [*chain.from_iterable(trees), seen[: batch * width * width].view(batch, width, width)]
