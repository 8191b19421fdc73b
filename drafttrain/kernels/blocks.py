"""Decoder blocks in one native call, over the nodes of trees: Llama-, Mistral-, Qwen2- and Qwen3-style.

Every sum runs in an order given by the token's own position, so a token's states have the same bits alone, in
a tree, in a batch and with any number of threads: drafted decoding is bit-identical to plain decoding.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from drafttrain.kernels.build import library
from drafttrain.kernels.linear import KINDS, LinearStruct, NativeLinear
from drafttrain.kernels.team import team_size

FEW = 1 << 21  # multiplications that take less time than waking threads

Rope = Callable[[int], tuple[torch.Tensor, torch.Tensor]]  # cos, sin [n, head_dim / 2] of positions 0 … n - 1


@dataclass
class BlockParts:
    """The weights and settings of one block.

    Attributes:
        q, k, v, o, gate, up, down: its linear layers.
        input_norm, post_norm: weights of its RMS norms [H]; None: no such norm.
        q_norm, k_norm: weights of the norms of each head [head_dim]; None: none.
        window: positions that a token sees, itself included; 0: all.
    """

    q: NativeLinear
    k: NativeLinear
    v: NativeLinear
    o: NativeLinear
    gate: NativeLinear
    up: NativeLinear
    down: NativeLinear
    input_norm: torch.Tensor | None
    post_norm: torch.Tensor | None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    window: int = 0


class _Block(ctypes.Structure):
    _fields_ = [
        ("input_norm", ctypes.c_void_p),
        ("q", LinearStruct),
        ("k", LinearStruct),
        ("v", LinearStruct),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("o", LinearStruct),
        ("post_norm", ctypes.c_void_p),
        ("gate", LinearStruct),
        ("up", LinearStruct),
        ("down", LinearStruct),
        ("window", ctypes.c_int64),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        ("blocks", ctypes.c_int64),
        ("block", ctypes.c_void_p),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("head_dim", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("intermediate", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("final_norm", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
    ]


class _Nodes(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_int64),
        ("n", ctypes.c_int64),
        ("row", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("kind", ctypes.c_int64),
    ]


def places(kv: torch.Tensor, lengths: torch.Tensor) -> list[tuple[int, int, int, int]]:
    """Return per row of a KV buffer: number of verified slots, address of the keys, distance from a block's
    keys to its values in numbers, and number of slots. Arguments are those of `Nodes.of_batch`."""
    keys, row_size, plane, max_len = (
        kv.data_ptr(),
        kv.element_size() * kv.stride(2),
        kv.stride(1),
        kv.shape[4],
    )
    return [(length, keys + b * row_size, plane, max_len) for b, length in enumerate(lengths.tolist())]


@dataclass
class Nodes:
    """Nodes of some sequences, which may have separate KV caches and different numbers of nodes.

    Attributes:
        rows: per sequence: number of nodes, number of verified slots, width and address of its `ancestors`,
            address of its keys, distance from a block's keys to its values in numbers, and number of slots
            of its cache.
        positions, slots: of the N nodes of all sequences, int64 [N].
        dtype: of keys and values, fp32 or bf16.
        held: tensors that the addresses point to, kept alive.
    """

    rows: list[tuple[int, ...]]
    positions: torch.Tensor
    slots: torch.Tensor
    dtype: torch.dtype
    held: list[torch.Tensor]

    @classmethod
    def of_batch(
        cls,
        kv: torch.Tensor,
        lengths: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        ancestors: torch.Tensor | None,
    ) -> "Nodes":
        """Return the nodes of sequences that have equally many each and share one KV buffer.

        Args:
            kv: [blocks, 2, B, kv_heads, max_len, head_dim], fp32 or bf16, the first rows of a contiguous
                buffer.
            lengths: verified slots of each row, int64 [B]; every node sees them (but for a sliding window).
            positions: int64 [B, n].
            slots: slot of each node, int64 [B, n].
            ancestors: bool [B, n, w], [1, n, w] or [n, w]: which of the slots lengths[b] + 0 … w - 1 a node
                sees in addition, its own included, in order of position. None: they will not be read.
        """
        n, width, at, step = positions.shape[1], 0, 0, 0
        held = [kv]
        if ancestors is not None:
            ancestors = ancestors if ancestors.ndim == 3 else ancestors[None]
            shared = len(ancestors) == 1 or ancestors.stride(0) == 0
            ancestors = (ancestors[:1] if shared else ancestors).contiguous()
            at, width = ancestors.data_ptr(), ancestors.shape[2]
            step = 0 if shared else n * width
            held.append(ancestors)
        rows = [
            (n, length, width, at + b * step, *rest) for b, (length, *rest) in enumerate(places(kv, lengths))
        ]
        return cls(rows, positions.flatten(), slots.flatten(), kv.dtype, held)

    @classmethod
    def join(cls, parts: Sequence["Nodes"]) -> "Nodes":
        """Return the nodes of all parts, one part after the other; their keys must have the same dtype."""
        return cls(
            [row for part in parts for row in part.rows],
            torch.cat([part.positions for part in parts]),
            torch.cat([part.slots for part in parts]),
            parts[0].dtype,
            [tensor for part in parts for tensor in part.held],
        )

    def describe(self) -> tuple[_Nodes, object]:
        """Return the nodes in the library's form, and the objects that it points to, to be kept alive."""
        begin, facts = 0, []
        for n, *rest in self.rows:
            facts += [begin, n, *rest]
            begin += n
        rows = (ctypes.c_int64 * len(facts))(*facts)
        positions, slots = self.positions.contiguous(), self.slots.contiguous()
        at = ctypes.addressof(rows), positions.data_ptr(), slots.data_ptr()
        return _Nodes(len(self.rows), begin, *at, KINDS[self.dtype]), (rows, positions, slots)


class NativeBlocks(nn.Module):
    """Decoder blocks with the settings and the rotary tables that they share.

    Args:
        blocks: from the first to the last.
        final_norm: weight of the norm after the last block [H]; None: none.
        heads, kv_heads, head_dim: of attention.
        eps: of all norms.
        rope: rotary embedding.
    """

    def __init__(
        self,
        blocks: Sequence[BlockParts],
        final_norm: torch.Tensor | None,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        rope: Rope,
    ):
        super().__init__()
        self.native, self.rope, self.positions = library(), rope, 0
        self.hidden, self.head_dim, self.kv_heads = blocks[0].o.out_features, head_dim, kv_heads
        self.parts, self._lock = list(blocks), threading.Lock()
        self._held = []  # tensors that structures point to
        linears = [one for b in blocks for one in (b.q, b.k, b.v, b.o, b.gate, b.up, b.down)]
        if len({one.struct.kind for one in linears}) > 1:  # inputs are rounded for all of them, or for none
            raise ValueError("linear layers of blocks must have weights of one kind")
        self.round_inputs = blocks[0].q.round_inputs
        self._blocks = (_Block * len(blocks))(*map(self._structure, blocks))
        self._model = _Model(
            len(blocks),
            ctypes.addressof(self._blocks),
            heads,
            kv_heads,
            head_dim,
            self.hidden,
            blocks[0].gate.out_features,
            eps,
            head_dim**-0.5,
            self._vector(final_norm),
        )
        self.address = ctypes.addressof(self._model)
        self._keys_values_size = 2 * len(blocks) * kv_heads * head_dim * self.hidden  # numbers in k and v

    def _vector(self, weight: torch.Tensor | None) -> int | None:
        """Return the address of an fp32 copy of a vector, which is kept alive."""
        if weight is None:
            return None
        self._held.append(weight.detach().float().clone())  # a view would keep a file of weights mapped
        return self._held[-1].data_ptr()

    def _structure(self, parts: BlockParts) -> _Block:
        return _Block(
            self._vector(parts.input_norm),
            parts.q.struct,
            parts.k.struct,
            parts.v.struct,
            self._vector(parts.q_norm),
            self._vector(parts.k_norm),
            parts.o.struct,
            self._vector(parts.post_norm),
            parts.gate.struct,
            parts.up.struct,
            parts.down.struct,
            parts.window,
        )

    def reach(self, positions: int) -> None:
        """Extend the tables of cosines and sines to at least this many positions."""
        with self._lock:
            if positions <= self.positions:  # also if another thread has extended them meanwhile
                return
            longer = max(positions, 2 * self.positions, 1024)
            tables = [table.float().contiguous() for table in self.rope(longer)]
            self._held += tables  # another thread may still read the shorter ones, so all are kept
            self._model.cos, self._model.sin = (table.data_ptr() for table in tables)
            self.positions = longer

    def forward(
        self,
        x: torch.Tensor,
        nodes: Nodes,
        reach: int,
        taps: Sequence[int] = (),
        blocks: range | None = None,
        final: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run nodes through the blocks and write their keys and values into their slots.

        Args:
            x: fp32 [..., H] of N nodes, overwritten by the output of the last block.
            reach: all positions are below it.
            taps: indices of the blocks whose outputs are returned.
            blocks: the blocks to run; None: all.
            final: whether to norm the outputs of the last block.

        Returns:
            tapped states fp32 [..., taps · H], and normed outputs fp32 [..., H] or None.
        """
        self.reach(reach)
        shape = x.shape[:-1]
        tapped = torch.empty(*shape, len(taps) * self.hidden, dtype=torch.float)
        normed = torch.empty(*shape, self.hidden, dtype=torch.float) if final else None
        described, _held = nodes.describe()
        first, last = (0, len(self.parts)) if blocks is None else (blocks.start, blocks.stop)
        self.native.blocks(
            self.address,
            ctypes.addressof(described),
            x.view(len(nodes.positions), self.hidden).data_ptr(),  # raises if rows are not nodes
            first,
            last,
            (ctypes.c_int64 * len(taps))(*taps),
            len(taps),
            tapped.data_ptr(),
            None if normed is None else normed.data_ptr(),
            self.round_inputs,
            team_size(),
        )
        return tapped, normed

    def keys_values(self, x: torch.Tensor, nodes: Nodes, reach: int) -> None:
        """Write the keys and values of all blocks for states x, fp32 [..., H] of N nodes, which are the input
        of every block; `ancestors` are not read."""
        if x.shape[-1] != self.hidden:  # the library would read beyond it
            raise ValueError(f"x: must be [..., {self.hidden}], got {list(x.shape)}")
        self.reach(reach)
        described, _held = nodes.describe()
        multiplications = nodes.positions.numel() * self._keys_values_size
        self.native.keys_values(
            self.address,
            ctypes.addressof(described),
            x.data_ptr(),
            self.round_inputs,
            1 if multiplications < FEW else team_size(),
        )
