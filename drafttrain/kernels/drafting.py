"""Arguments of native drafting: a drafter, what its layers read, and the sequences that it drafts for."""

import ctypes
from itertools import chain
from typing import Protocol

import torch

from drafttrain.kernels.blocks import NativeBlocks
from drafttrain.kernels.linear import KINDS, NativeLinear
from drafttrain.kernels.team import team_size


class Inputs(ctypes.Structure):
    """The input of a drafter's layers at a token: its embedding, or a join, which is norm(embedding) times
    one layer and norm(state) times another.

    Args:
        embed: [V, H].
        join, follow: layers without bias of embeddings and of states, each with the weights of its norm, or
            None: not normed.
        states: of the sequences, [B, K·H].
        own_states: after a tree's root the state is that of the parent, K·H = H.
    """

    _fields_ = [("embed", ctypes.c_void_p), ("kind", ctypes.c_int64), ("vocabulary", ctypes.c_int64)]
    _fields_ += [(name, ctypes.c_void_p) for name in ("join", "follow", "join_norm", "follow_norm", "states")]
    _fields_ += [("own_states", ctypes.c_int64), ("round_inputs", ctypes.c_int64)]

    def __init__(
        self,
        embed: torch.Tensor,
        join: tuple[NativeLinear, torch.Tensor | None] | None = None,
        follow: tuple[NativeLinear, torch.Tensor | None] | None = None,
        states: torch.Tensor | None = None,
        own_states: bool = False,
    ):
        layers, norms = zip(*(one or (None, None) for one in (join, follow)))
        numbers = [one if one is None else one.detach().float().contiguous() for one in (*norms, states)]
        embed = embed.contiguous()
        self._held = embed, layers, numbers
        super().__init__(
            *(embed.data_ptr(), KINDS[embed.dtype], len(embed)),
            *(one if one is None else one.address for one in layers),
            *(one if one is None else one.data_ptr() for one in numbers),
            *(own_states, join is not None and join[0].round_inputs),
        )


class Places(Protocol):
    """Keys and values of the sequences that are drafted for: a `KvCache`, or several joined."""

    dtype: torch.dtype

    def reserve(self, n: int) -> int:
        """Make room for n slots after each row's verified ones; return how many slots are then in view."""

    def places(self) -> list[tuple[int, int, int, int]]:
        """Return where the rows' keys and values are."""


class Drafting(ctypes.Structure):
    """A drafter with the sequences that it drafts for, once there is room for their trees.

    Args:
        to_target: the target's ids of the draft vocabulary, int64 [D]; for growth alone.
    """

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("model", "head", "inputs", "to_target", "caches")),
        *((name, ctypes.c_int64) for name in ("kind", "round_inputs", "round_head", "threads")),
    ]

    def __init__(
        self,
        blocks: NativeBlocks,
        head: NativeLinear,
        inputs: Inputs,
        state: Places,
        to_target: torch.Tensor | None = None,
    ):
        to_target = to_target if to_target is None else to_target.contiguous()
        places = list(chain.from_iterable(state.places()))
        caches = (ctypes.c_int64 * len(places))(*places)
        self._held = blocks, head, inputs, to_target, caches
        super().__init__(
            *(blocks.address, head.address, ctypes.addressof(inputs)),
            *(to_target if to_target is None else to_target.data_ptr(), ctypes.addressof(caches)),
            *(KINDS[state.dtype], blocks.round_inputs, head.round_inputs, team_size()),
        )
