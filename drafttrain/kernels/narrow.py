"""Weights of drafters in 7 bits with a scale for each output, and in 4 with more of them."""

import torch
import torch.nn.functional as F

BYTE, HALF_BYTE = 2, 3  # kinds of weights in forward.cpp
ZERO, LARGEST = 64, 63  # the byte of a weight of 0, and the most that one differs from it
GROUP = 32  # neighbouring inputs whose 4-bit weights share a scale and an offset
LEVELS = range(15, 11, -1)  # steps between the smallest and the largest weight of a group


def narrowed(
    weight: torch.Tensor, bits: int, panel: int
) -> tuple[int, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the kind, the numbers, and the scales or factors, of weights [out, in] in 7 or 4 bits; in 7 if
    their inputs are no multiple of GROUP.

    Args:
        panel: as in `to_bytes`.
    """
    if bits == 4 and weight.shape[1] % GROUP == 0:
        numbers, factors = to_half_bytes(weight)
        return HALF_BYTE, numbers, None, factors
    numbers, scales = to_bytes(weight, panel)
    return BYTE, numbers, scales, None


def to_bytes(weight: torch.Tensor, panel: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Round weights [out, in] to 7 bits, the largest of each output's to 63.

    Args:
        panel: the number of scales is a multiple of it.

    Returns:
        bytes around ZERO, uint8 [out, in], and the outputs' scales, fp32 [out], padded with zeros.
    """
    weight = weight.detach().float()
    scales = weight.abs().amax(1).clamp(min=torch.finfo(torch.float).tiny) / LARGEST  # [out]
    numbers = (weight / scales[:, None]).round_().add_(ZERO).to(torch.uint8)
    return numbers, F.pad(scales, (0, -len(scales) % panel))


def to_half_bytes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round weights [out, in] to 4 bits: number * scale + offset, by the GROUP of inputs, of which `in` is a
    multiple. A group has as many levels as fit it best: the weights may have been rounded so before (GGUF).

    Returns:
        numbers 0 ... 15, uint8 [out, in], and scales and offsets, bf16 [2, out, in / GROUP].
    """
    groups = weight.detach().float().unflatten(1, (-1, GROUP))  # [out, g, GROUP]
    least, largest = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)  # [out, g, 1]
    offset = least.bfloat16().float()
    numbers = torch.zeros_like(groups, dtype=torch.uint8)  # [out, g, GROUP]
    best, scales = torch.full_like(offset, torch.inf), torch.ones_like(offset)
    for levels in LEVELS:
        scale = ((largest - least) / levels).clamp(min=1e-30).bfloat16().float()
        rounded = ((groups - offset) / scale).round_().clamp_(0, 15)
        error = (rounded * scale + offset - groups).square_().sum(2, keepdim=True)
        better = error < best
        best, scales = torch.where(better, error, best), torch.where(better, scale, scales)
        numbers = torch.where(better, rounded.to(torch.uint8), numbers)
    return numbers.flatten(1), torch.stack([scales, offset]).squeeze(3).bfloat16()
