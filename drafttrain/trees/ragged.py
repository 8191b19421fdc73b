"""Sub-trees whose rows keep different numbers of nodes. Fields are those of `kernels.trees`."""

from collections.abc import Sequence

import torch


def keep_nodes(
    fields: Sequence[torch.Tensor], keep: torch.Tensor, order: torch.Tensor, sizes: torch.Tensor
) -> list[torch.Tensor]:
    """Return the fields of the nodes marked in `keep`, bool [B, n], which is closed under parents.

    Args:
        order: the indices of those nodes, int64 [B, w], of which the first sizes[b] are not padding.
    """
    tokens, parents, depths, log_probs, entropies, joint, ancestors = fields
    n, width = ancestors.shape[1], order.shape[1]
    new_index = keep.cumsum(1) - 1  # [B, n]
    parents = new_index.gather(1, parents.clamp(min=0)).masked_fill(parents < 0, -1)  # [B, n]
    padding = torch.arange(width, device=order.device) >= sizes[:, None]  # [B, w]

    def moved(values: torch.Tensor, fill: float) -> torch.Tensor:
        return values.gather(1, order).masked_fill(padding, fill)  # [B, w]

    rows = ancestors.gather(1, order[:, :, None].expand(-1, -1, n))  # [B, w, n]
    ancestors = rows.gather(2, order[:, None].expand(-1, width, -1))  # [B, w, w]
    itself = torch.eye(width, dtype=torch.bool, device=order.device)  # [w, w]
    padded = padding[:, :, None] | padding[:, None]  # [B, w, w]
    whole = (moved(values, 0) for values in (tokens, parents, depths))
    numbers = moved(log_probs, -torch.inf), moved(entropies, 0.0), moved(joint, -torch.inf)
    return [*whole, *numbers, ancestors & ~padded | itself]
