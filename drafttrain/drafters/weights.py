"""The tensors in a drafter's file."""

import os

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from drafttrain.utils.files import require_file

HEAD, NUMBERS, SCALES = "lm_head.weight", "lm_head.int8", "lm_head.scales"


def read_tensors(file: str | os.PathLike) -> dict[str, torch.Tensor]:
    """Return the tensors of a drafter's file; an int8 head as what it stands for, in fp32.

    Raises:
        OSError, SafetensorError: there is no such file, or it is damaged.
        UserError: it is a pipe or a device.
    """
    require_file(file)
    tensors = load_file(file)
    if NUMBERS in tensors:
        numbers, scales = tensors.pop(NUMBERS), tensors.pop(SCALES, torch.empty(0))  # [D, H], [D]
        if numbers.ndim != 2 or scales.shape != numbers.shape[:1]:
            raise SafetensorError(f"{NUMBERS} without {SCALES} for its rows")
        tensors[HEAD] = numbers.float() * scales.float()[:, None]  # [D, H]
    return tensors
