"""Give the weights that narrow ones stand for, in fp64."""

import torch

from drafttrain.kernels.narrow import GROUP, ZERO, to_bytes, to_half_bytes


def in_bytes(weight: torch.Tensor) -> torch.Tensor:
    """Return weights [out, in] as bytes stand for them, fp64."""
    numbers, scales = to_bytes(weight)
    rounded = (numbers.double() - ZERO) * scales[:, None].double()  # [out, in]
    assert (rounded - weight).abs().le(scales[:, None] / 2 + 1e-6).all()
    return rounded


def in_half_bytes(weight: torch.Tensor) -> torch.Tensor:
    """Return weights [out, in] as half bytes stand for them, fp64."""
    numbers, (scales, offsets) = to_half_bytes(weight)
    assert numbers.max() <= 15
    scale, offset = (one.double().repeat_interleave(GROUP, 1) for one in (scales, offsets))  # [out, in]
    return numbers * scale + offset
