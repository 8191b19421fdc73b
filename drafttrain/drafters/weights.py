"""The tensors in a drafter's file."""

import os

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from drafttrain.utils.files import require_file

WEIGHT, NUMBERS, SCALES = ".weight", ".int8", ".scales"  # suffixes: of a matrix, and of one in int8


def read_tensors(file: str | os.PathLike) -> dict[str, torch.Tensor]:
    """Return the tensors of a drafter's file; int8 matrices dequantized to fp32.

    Raises:
        OSError, SafetensorError: there is no such file, or it is damaged.
        UserError: it is a pipe or a device.
    """
    require_file(file)
    tensors = load_file(file)
    for name in [name.removesuffix(NUMBERS) for name in tensors if name.endswith(NUMBERS)]:
        numbers, scales = tensors.pop(name + NUMBERS), tensors.pop(name + SCALES, torch.empty(0))
        if numbers.ndim != 2 or scales.shape != numbers.shape[:1]:  # [D, H], [D]
            raise SafetensorError(f"{name}{NUMBERS} without {name}{SCALES} for its rows")
        tensors[name + WEIGHT] = numbers.float() * scales.float()[:, None]  # [D, H]
    return tensors
