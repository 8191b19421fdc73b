"""Bytes of the weights that modules hold, those packed for native forwards included."""

import torch
from torch import nn

from drafttrain.kernels.linear import NativeLinear


def weights_by_address(module: nn.Module) -> dict[int, int]:
    """Return bytes by address of parameters, buffers and packed layers; what is shared has one address."""
    tensors = [*module.parameters(), *module.buffers()]
    found = {}
    for layer in module.modules():
        if isinstance(layer, NativeLinear):
            size = layer.native.packed_bytes(layer.out_features, layer.in_features, layer.struct.kind)
            found[layer.struct.weight] = size
            tensors += [one for one in (layer.bias, layer.scales) if one is not None]
    return found | tensors_by_address(tensors)


def tensors_by_address(tensors: list[torch.Tensor]) -> dict[int, int]:
    """Return bytes by address of the storage of tensors."""
    return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
