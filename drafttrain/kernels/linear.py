"""Linear layers whose weights are packed for the native library: for inference on a CPU.

A row of the result has the same bits with any other rows beside it, and with any number of threads.
"""

import ctypes

import torch
from torch import nn

from drafttrain.kernels.build import library, variant
from drafttrain.kernels.memory import HUGE_PAGE
from drafttrain.kernels.team import team_size

KINDS = {torch.bfloat16: 0, torch.float32: 1}  # of forward.cpp; narrow.py has two more
CACHE_LINE, REGION = 64, 32 << 20  # bytes


class LinearStruct(ctypes.Structure):
    """`Linear` of forward.cpp; all zeros: no such layer."""

    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("scales", ctypes.c_void_p),
    ]


def is_available() -> bool:
    """Return whether there is a native library for this machine; the first call may compile it."""
    return library() is not None


def rounds_inputs(dtype: torch.dtype) -> bool:
    """Return whether products with weights of this dtype round their inputs to bf16 (vdpbf16ps does)."""
    return dtype == torch.bfloat16 and variant() == "avx512_bf16"


_region: tuple[torch.Tensor, int, int] | None = None  # of packed weights: its memory, first free byte, end


def _allocate(size: int) -> tuple[torch.Tensor, int]:
    """Return memory for packed weights, and the address at which they begin.

    Layers share regions of huge pages: a stream through all of them misses few address translations. A region
    is freed with the last layer in it.
    """
    global _region
    if _region is None or _region[1] + size > _region[2]:
        length = -(-max(size, REGION) // HUGE_PAGE) * HUGE_PAGE
        memory = torch.empty(length + HUGE_PAGE, dtype=torch.uint8)
        begin = -(-memory.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        library().advise_huge(begin, length)
        _region = memory, begin, begin + length
    memory, begin, end = _region
    _region = memory, begin + -(-size // CACHE_LINE) * CACHE_LINE, end
    return memory, begin


class NativeLinear(nn.Module):
    """A linear layer on the CPU, for inference; its weight exists in packed form only.

    Args:
        weight: [out, in], bf16 or fp32; sums are fp32 in both.
        bias: [out] or None.
        bits: keep weights in bf16 in 7 or 4 bits each, so that less is read, where products round inputs to
            bf16 anyway: for drafters, whose errors cost acceptance alone. None: as they are.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, bits: int | None = None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype, self.native = weight.dtype, library()
        kind, rows, self.scales, factors = KINDS[weight.dtype], weight.detach().contiguous(), None, None
        if bits and rounds_inputs(weight.dtype):
            from drafttrain.kernels.narrow import narrowed

            kind, rows, self.scales, factors = narrowed(weight, bits, self.native.panel_outputs())
        size = self.native.packed_bytes(self.out_features, self.in_features, kind)
        # Plain attributes: nothing may cast, move or save them.
        self.packed, start = _allocate(size)
        self.bias = None if bias is None else bias.detach().float().contiguous()  # [out]
        bias_at, scales_at, factors_at = (
            None if one is None else one.data_ptr() for one in (self.bias, self.scales, factors)
        )
        sizes = self.out_features, self.in_features, kind
        self.native.pack(rows.data_ptr(), *sizes, start, factors_at, team_size())
        self.struct = LinearStruct(start, bias_at, self.in_features, self.out_features, kind, scales_at)
        self.address = ctypes.addressof(self.struct)
        self.round_inputs = rounds_inputs(weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out] in x's dtype."""
        return self.product(x).to(x.dtype)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out] in fp32."""
        rows = x.float().contiguous()
        out = torch.empty((*x.shape[:-1], self.out_features))
        count = rows.numel() // self.in_features
        self.native.linear(
            self.address, rows.data_ptr(), count, out.data_ptr(), self.round_inputs, team_size()
        )
        return out

    def top_log_probs(self, x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities, fp32, and numbers of the k most probable outputs [..., k] after inputs
        [..., in], k <= out: the layer is a head, and its products are logits. Among equals the first win."""
        if not 1 <= k <= self.out_features:  # the library would read beyond its buffers
            raise ValueError(f"k: must be in 1..{self.out_features}, got {k}")
        rows, shape = x.float().contiguous(), (*x.shape[:-1], k)
        values, places = torch.empty(shape), torch.empty(shape, dtype=torch.long)
        self.native.linear_top(
            self.address,
            rows.data_ptr(),
            rows.numel() // self.in_features,
            k,
            values.data_ptr(),
            places.data_ptr(),
            self.round_inputs,
            team_size(),
        )
        return values, places


def can_be_native(module: nn.Module | None) -> bool:
    """Return whether this is a linear layer that `NativeLinear` can replace here."""
    return (
        type(module) is nn.Linear  # a subclass may do something else
        and module.weight.device.type == "cpu"
        and module.weight.dtype in (torch.bfloat16, torch.float32)
        and is_available()
    )


def make_native(module: nn.Module, bits: int | None = None) -> int:
    """Replace the linear layers below a module by native ones; return how many.

    The row-major weights go where nothing else holds them, so that the module can no longer be trained, saved
    or copied.

    Args:
        bits: as in `NativeLinear`.
    """
    replaced = 0
    for name, child in module.named_children():
        if can_be_native(child):
            setattr(module, name, NativeLinear(child.weight, child.bias, bits))
            replaced += 1
        else:
            replaced += make_native(child, bits)
    return replaced
