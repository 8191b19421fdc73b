"""Forward KL from one softmax to another with its gradient, in one pass over both rows of logits."""

import torch

from drafttrain.kernels.build import library
from drafttrain.kernels.team import team_size

DTYPES = (torch.bfloat16, torch.float)


def divergence(logits: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Compute D_KL(softmax(teacher) || softmax(logits)) for each row of logits, bf16 or fp32 [N, D].

    The logits are overwritten with the gradient of the divergence with respect to them. Softmaxes and
    differences are in fp32.

    Returns:
        the divergence of each row, fp32 [N], and whether the first maxima of both rows are at one place, bool
        [N]; None, and the logits are unchanged, where there is no native library for them.
    """
    if logits.device.type != "cpu" or not {logits.dtype, teacher.dtype} <= set(DTYPES):
        return None
    if (native := library()) is None or not logits.is_contiguous():
        return None
    teacher, rows = teacher.contiguous(), len(logits)
    losses, same = (torch.empty(rows, dtype=dtype) for dtype in (torch.float, torch.bool))
    pairs = ((one.data_ptr(), int(one.dtype == torch.bfloat16)) for one in (logits, teacher))
    pointers = (value for pair in pairs for value in pair)
    native.divergences(*pointers, *logits.shape, losses.data_ptr(), same.data_ptr(), team_size())
    return losses, same
