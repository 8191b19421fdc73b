"""Arguments of native drafting: a drafter, what its layers read, and the sequences that it drafts for."""

import ctypes
from itertools import chain
from typing import Protocol

import torch

from drafttrain.kernels.blocks import NativeBlocks
from drafttrain.kernels.linear import KINDS, NativeLinear
from drafttrain.kernels.team import team_size


class Inputs(ctypes.Structure):
    """Input of a drafter's layers at a token: its embedding, or the sum join(norm(embedding)) +
    follow(norm(state)).

    Args:
        embed: embeddings, [V, H].
        join, follow: linear layers without bias of embeddings and of states, each with the weight of its
            norm; None as weight: not normed.
        states: states of the sequences, [B, K·H].
        own_states: below the root, use the drafter's own state at the parent node; needs K·H = H.
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
    """KV cache of the sequences that are drafted for: a `KvCache`, or several joined."""

    dtype: torch.dtype

    def reserve(self, n: int) -> int:
        """Make room for n slots after each row's verified ones; return how many slots are then in view."""

    def places(self) -> list[tuple[int, int, int, int]]:
        """Return where the keys and values of each row are (`kernels.blocks.places`)."""


class Drafting(ctypes.Structure):
    """A drafter and the sequences that it drafts for, whose KV caches must already have room for their trees.

    Args:
        to_target: the target's ids of the draft vocabulary, int64 [D]; only growth needs them.
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
