"""The largest entries of rows: the target's most probable tokens after each node, by its logits."""

import torch

from drafttrain.kernels.build import library
from drafttrain.kernels.team import team_size


def largest(logits: torch.Tensor, k: int) -> torch.Tensor:
    """Return the indices of the k largest logits of each row [..., V], the largest first, int64 [..., k]; NaN
    counts as largest. Among equals the first come first on a CPU in fp32, elsewhere any."""
    native = library() if logits.device.type == "cpu" and logits.dtype == torch.float else None
    if native is None:
        return logits.topk(k).indices
    width = logits.shape[-1]
    if not 1 <= k <= width:  # the library would read beyond its buffers
        raise ValueError(f"k: must be >= 1 and <= {width}, got {k}")
    logits = logits.contiguous()
    places = torch.empty((*logits.shape[:-1], k), dtype=torch.long)  # [..., k]
    native.largest(logits.data_ptr(), places.numel() // k, width, k, places.data_ptr(), team_size())
    return places
