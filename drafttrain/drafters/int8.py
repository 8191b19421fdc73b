"""Weight matrices in int8, which take half the space of bf16 in a bundle."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from drafttrain.drafters.weights import NUMBERS, SCALES, WEIGHT

LARGEST = 127
HEAD, EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"


def int8_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix [D, H] to int8 with a scale for each row. Scales are rounded to bf16, so that numbers
    times scales are exact in fp32, and rounding them again gives the same numbers.

    Returns:
        int8 [D, H] and fp32 [D].
    """
    weight = weight.float()
    scales = (weight.abs().amax(1) / LARGEST).bfloat16().float()  # [D]
    numbers = weight / scales.clamp(min=torch.finfo(torch.float).tiny)[:, None]
    return numbers.round().clamp(-LARGEST, LARGEST).to(torch.int8), scales


def int8_names(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> list[str]:
    """Return the names of the weights that a drafter of this config stores in int8."""
    head, layers = config.get("head_dtype"), config.get("layers_dtype")
    matrices = [name for name, tensor in tensors.items() if tensor.ndim == 2 and name != EMBEDDINGS]
    return [name for name in matrices if (head if name == HEAD else layers)]


def round_weights(drafter: nn.Module) -> None:
    """Round the weights that a drafter stores in int8 to their stored values."""
    weights = dict(drafter.named_parameters())
    with torch.no_grad():
        for name in int8_names(weights, drafter.config.to_dict()):
            numbers, scales = int8_rows(weights[name])  # [D, H], [D]
            weights[name].copy_(numbers.float() * scales[:, None])


def with_int8(
    tensors: Mapping[str, torch.Tensor], names: list[str], dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Return the tensors with int8 numbers and scales of this dtype in place of the named weights."""
    stored = {name: tensor for name, tensor in tensors.items() if name not in names}
    for name in names:
        numbers, scales = int8_rows(tensors[name])
        module = name.removesuffix(WEIGHT)
        stored |= {module + NUMBERS: numbers, module + SCALES: scales.to(dtype)}
    return stored
