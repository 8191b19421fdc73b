"""Linear layers in the layout that oneDNN multiplies fastest, for decoding in bf16 on a CPU.

Decoding reads every weight for a handful of tokens. A plain `nn.Linear` lets oneDNN pick its way through
row-major weights at every call; packed once, the same products come out bit by bit, in two thirds of the time
for one token.

The operators are torch's own, but private (inductor calls them): where they are missing nothing is packed.
"""

import torch
from torch import nn

PRODUCT = ("_reorder_linear_weight", "_linear_pointwise")


class PackedLinear(nn.Module):
    """A bf16 linear layer on the CPU, for inference; its weight exists in packed form only."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 1)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]"""
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")


def can_pack(module: nn.Module) -> bool:
    """Whether this is a linear layer that gains from packing, and torch can."""
    return (
        type(module) is nn.Linear  # a subclass may do something else
        and module.weight.dtype == torch.bfloat16
        and module.weight.device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and all(hasattr(torch.ops.mkldnn, name) for name in PRODUCT)
    )


def pack_linears(module: nn.Module) -> int:
    """Replaces the linear layers below a module by packed ones; returns how many. The row-major weights go
    with them where nothing else holds them, so that the module can no longer be trained or saved."""
    packed = 0
    for name, child in module.named_children():
        if can_pack(child):
            setattr(module, name, PackedLinear(child))
            packed += 1
        else:
            packed += pack_linears(child)
    return packed
