"""Linear layers whose weights are packed for the native library: for inference on a CPU.

A row of the result has the same bits in any batch and with any number of threads.
"""

import ctypes
import threading

import torch
from torch import nn

from drafttrain.kernels.build import BF16_PRODUCTS, library, variant
from drafttrain.kernels.memory import HUGE_PAGE
from drafttrain.kernels.team import team_size

KINDS = {torch.bfloat16: 0, torch.float32: 1, torch.uint8: 2}
CACHE_LINE, REGION = 64, 32 << 20  # bytes
ZERO, LARGEST = 64, 63  # byte of a weight of 0, and the largest distance from it


def to_bytes(weight: torch.Tensor, panel: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Round weights [out, in] to 7 bits around ZERO, the largest of each output to LARGEST from it. Return
    bytes, uint8 [out, in], and scales of the outputs, fp32 [out], padded with 0 to a multiple of `panel`."""
    weight = weight.detach().float()
    scales = weight.abs().amax(1).clamp(min=torch.finfo(torch.float).tiny) / LARGEST  # [out]
    numbers = (weight / scales[:, None]).round_().add_(ZERO).to(torch.uint8)
    return numbers, nn.functional.pad(scales, (0, -len(scales) % panel))


class LinearStruct(ctypes.Structure):
    """`Linear` of cpp/linear.h; all zeros: no such layer."""

    _fields_ = [(name, ctypes.c_void_p) for name in ("weight", "bias")]
    _fields_ += [(name, ctypes.c_int64) for name in ("inputs", "outputs", "kind")]
    _fields_ += [("scales", ctypes.c_void_p)]


def is_available() -> bool:
    """Return whether there is a native library for this machine; the first call may compile it."""
    return library() is not None


def rounds_inputs(dtype: torch.dtype) -> bool:
    """Return whether products with weights of this dtype round their inputs to bf16 (vdpbf16ps, AMX)."""
    return dtype == torch.bfloat16 and variant() in BF16_PRODUCTS


_region: tuple[torch.Tensor, int, int] | None = None  # for packed weights: its memory, first free byte, end
_region_lock = threading.Lock()


def _allocate(size: int) -> tuple[torch.Tensor, int]:
    """Return memory for packed weights, and the address at which they begin.

    Layers share regions of huge pages, so that reading all of them in turn causes few TLB misses. A region is
    freed with the last layer in it, the newest once there is another.
    """
    global _region
    with _region_lock:
        region = _region if size < REGION else None  # larger layers do not share a region
        if region is None or region[1] + size > region[2]:
            length = -(-max(size, REGION) // HUGE_PAGE) * HUGE_PAGE
            memory = torch.empty(length + HUGE_PAGE, dtype=torch.uint8)
            begin = -(-memory.data_ptr() // HUGE_PAGE) * HUGE_PAGE
            library().advise_huge(begin, length)
            region = memory, begin, begin + length
        memory, begin, end = region
        if size < REGION:
            _region = memory, begin + -(-size // CACHE_LINE) * CACHE_LINE, end
        return memory, begin


class NativeLinear(nn.Module):
    """A linear layer on the CPU, for inference; its weight exists in packed form only.

    Args:
        weight: [out, in], bf16 or fp32; sums are fp32 in both.
        bias: [out] or None.
        narrow: store bf16 weights as bytes of 7 bits, half as much to read, and round inputs to 8 bits (AMX:
            to bf16); not with `generic`. For drafters, whose errors only lower the acceptance rate.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, narrow: bool = False):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype, self.native = weight.dtype, library()
        self.scales, row_major = None, weight.detach().contiguous()  # [out, in]
        if narrow and weight.dtype == torch.bfloat16 and variant() != "generic":  # bytes are slower there
            row_major, self.scales = to_bytes(weight, self.native.panel_outputs())
        kind = KINDS[row_major.dtype]
        size = self.native.packed_bytes(*weight.shape, kind)
        # Plain attributes: nothing may cast, move or save them.
        self.packed, start = _allocate(size)
        # a copy: a view of one tensor would keep a whole file of weights mapped
        self.bias = None if bias is None else bias.detach().float().clone()  # [out]
        self.native.pack(row_major.data_ptr(), *weight.shape, kind, start, team_size())
        bias_at = None if self.bias is None else self.bias.data_ptr()
        scales_at = None if self.scales is None else self.scales.data_ptr()
        self.struct = LinearStruct(start, bias_at, self.in_features, self.out_features, kind, scales_at)
        self.address = ctypes.addressof(self.struct)
        self.round_inputs = rounds_inputs(weight.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return outputs [..., out] for inputs [..., in], in x's dtype."""
        return self.product(x).to(x.dtype)

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Return outputs [..., out] for inputs [..., in], in fp32."""
        rows, out = self._rows(x), torch.empty((*x.shape[:-1], self.out_features), dtype=torch.float)
        count = rows.numel() // self.in_features
        called = self.address, rows.data_ptr(), count, out.data_ptr(), self.round_inputs
        self.native.linear(*called, team_size())
        return out

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != self.in_features:  # the library would read or write beyond its buffers
            raise ValueError(f"x: must be [..., {self.in_features}], got {list(x.shape)}")
        return x.float().contiguous()

    def top_log_probs(self, x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities, fp32, and indices of the k most probable outputs [..., k] for inputs
        [..., in], k <= out. The layer is an LM head with logits as outputs. Among equals the first win."""
        if not 1 <= k <= self.out_features:  # the library would read beyond its buffers
            raise ValueError(f"k: must be in 1..{self.out_features}, got {k}")
        rows, shape = self._rows(x), (*x.shape[:-1], k)
        values, places = (torch.empty(shape, dtype=dtype) for dtype in (torch.float, torch.long))
        count, found = rows.numel() // self.in_features, (k, values.data_ptr(), places.data_ptr())
        self.native.linear_top(self.address, rows.data_ptr(), count, *found, self.round_inputs, team_size())
        return values, places


def can_be_native(module: nn.Module | None) -> bool:
    """Return whether this is a linear layer that `NativeLinear` can replace here."""
    return (
        type(module) is nn.Linear  # a subclass may do something else
        and module.weight.device.type == "cpu"
        and module.weight.dtype in (torch.bfloat16, torch.float32)
        and is_available()
    )


def make_native(module: nn.Module, narrow: bool = False) -> int:
    """Replace the linear layers below a module by native ones; return how many.

    The row-major weights are freed unless something else holds them; the module can no longer be trained,
    saved or copied.

    Args:
        narrow: as in `NativeLinear`.
    """
    replaced = 0
    for name, child in module.named_children():
        if can_be_native(child):
            setattr(module, name, NativeLinear(child.weight, child.bias, narrow))
            replaced += 1
        else:
            replaced += make_native(child, narrow)
    return replaced
