"""Linear layers in the layout that oneDNN multiplies fastest, for decoding in bf16 on a CPU.

Decoding reads every weight for a handful of tokens. With a plain `nn.Linear`, oneDNN reads row-major weights
at every call. With weights packed once, the results are the same bit by bit, in two thirds of the time for
one token. Layers that read the same input (queries, keys and values; gate and up) become one product, because
a call costs as much as a small product.

The operators are torch's, but private (inductor calls them): where they are missing nothing is packed.
"""

import threading
from collections.abc import Sequence

import torch
from torch import nn

PRODUCT = ("_reorder_linear_weight", "_linear_pointwise")
SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # names of siblings


class PackedLinear(nn.Module):
    """A bf16 linear layer on the CPU, for inference; its weight exists in packed form only."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1)
        # a plain attribute is found faster than a parameter, and a model has hundreds of these layers
        self.bias = None if bias is None else bias.detach()
        self.product = torch.ops.mkldnn._linear_pointwise.default

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        return self.product(x, self.weight, self.bias, "none", [], "")


class _Joined(threading.local):
    """A product shared by sibling layers, with those outputs for its last input that were not taken yet."""

    def __init__(self, linear: PackedLinear, sizes: list[int]):
        self.linear, self.sizes = linear, sizes
        self.input: torch.Tensor | None = None
        self.parts: dict[int, torch.Tensor] = {}

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        if self.input is not x or index not in self.parts:
            self.input = x
            self.parts = dict(enumerate(self.linear(x).split(self.sizes, dim=-1)))
        found = self.parts.pop(index)
        if not self.parts:
            self.input = None  # do not keep it alive
        return found


class JoinedLinear(nn.Module):
    """One of several linear layers that are called with the same tensor, one after the other: the first call
    computes all of them. Calls in another order give the same results, but take longer."""

    def __init__(self, joined: _Joined, index: int):
        super().__init__()
        self.joined, self.index = joined, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        return self.joined.part(self.index, x)


def can_pack(module: nn.Module | None) -> bool:
    """Return whether this is a linear layer that packing makes faster and that torch can pack."""
    return (
        type(module) is nn.Linear  # a subclass may do something else
        and module.weight.dtype == torch.bfloat16
        and module.weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and all(hasattr(torch.ops.mkldnn, name) for name in PRODUCT)
    )


def pack_linears(module: nn.Module, same_input: Sequence[Sequence[str]] = SAME_INPUT) -> int:
    """Replace the linear layers below a module by packed ones, and return their number. The row-major weights
    are freed unless something else holds them: the module can no longer be trained, saved or copied.

    Args:
        same_input: names of siblings that are always called with the same input.
    """
    packed = 0
    for names in same_input:
        packed += _join(module, names)
    for name, child in module.named_children():
        if can_pack(child):
            setattr(module, name, PackedLinear(child.weight, child.bias))
            packed += 1
        else:
            packed += pack_linears(child, same_input)
    return packed


def _join(module: nn.Module, names: Sequence[str]) -> int:
    """Join these children if all can be packed and read inputs of one size; return the number joined."""
    children = [getattr(module, name, None) for name in names]
    if not all(map(can_pack, children)) or len({child.in_features for child in children}) > 1:
        return 0
    biases = [child.bias for child in children]
    if any(bias is None for bias in biases) and any(bias is not None for bias in biases):
        return 0
    weight = torch.cat([child.weight for child in children])  # [out of all, in]
    linear = PackedLinear(weight, None if biases[0] is None else torch.cat(biases))
    joined = _Joined(linear, [child.out_features for child in children])
    for index, name in enumerate(names):
        setattr(module, name, JoinedLinear(joined, index))
    return len(names)
