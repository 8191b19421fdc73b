"""Large buffers in huge pages: the first write to each page of 4 KB costs a fault, which for the keys and
values of a long prompt takes longer than copying them."""

from collections.abc import Sequence

import torch

from drafttrain.kernels.build import library

HUGE_PAGE = 2 << 20  # bytes
MAPPED = 32 << 20  # bytes from which malloc maps fresh pages each time; smaller buffers reuse pages


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    """Return an uninitialized tensor. On a CPU with the native library, a large one is put into huge pages
    as far as it fills them and the system has them."""
    tensor = torch.empty(shape, dtype=dtype, device=device)
    if tensor.device.type != "cpu" or tensor.nbytes < MAPPED:
        return tensor
    begin = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
    end = (tensor.data_ptr() + tensor.nbytes) // HUGE_PAGE * HUGE_PAGE
    if end > begin and (native := library()) is not None:
        native.advise_huge(begin, end - begin)
    return tensor
