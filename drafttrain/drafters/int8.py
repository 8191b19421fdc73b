"""LM heads in int8: in a bundle's file half as large as in bf16."""

import torch

from drafttrain.drafters.weights import HEAD, NUMBERS, SCALES

LARGEST = 127


def int8_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round a matrix [D, H] to int8 with a scale for each row, itself of bf16's digits, so that numbers times
    scales are exact in fp32, and rounded to the same again.

    Returns:
        int8 [D, H] and fp32 [D].
    """
    weight = weight.float()
    scales = (weight.abs().amax(1) / LARGEST).bfloat16().float()  # [D]
    numbers = weight / scales.clamp(min=torch.finfo(torch.float).tiny)[:, None]
    return numbers.round().clamp(-LARGEST, LARGEST).to(torch.int8), scales


def with_int8_head(tensors: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors with int8 numbers and scales of this dtype in place of the head."""
    numbers, scales = int8_rows(tensors[HEAD])
    others = {name: tensor for name, tensor in tensors.items() if name != HEAD}
    return {**others, NUMBERS: numbers, SCALES: scales.to(dtype)}
