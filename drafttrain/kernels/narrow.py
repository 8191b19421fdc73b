"""Weights of drafters as bytes of 7 bits, with a scale for each output."""

import torch
import torch.nn.functional as F

ZERO, LARGEST = 64, 63  # the byte of a weight of 0, and the most that one differs from it


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
