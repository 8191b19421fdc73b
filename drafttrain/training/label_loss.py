"""Train on a text's tokens instead of the target's distributions (an ablation of the EDD paper, Table 3)."""

import torch

from drafttrain.drafters.model import DraftModel
from drafttrain.training.losses import head_kl


def draft_ids(drafter: DraftModel, vocab_size: int) -> torch.Tensor:
    """Return the draft-vocabulary id of each target token, -1 for those outside, int64 [V]."""
    ids = drafter.draft_to_target
    found = torch.full((vocab_size,), -1, device=ids.device)
    found[ids] = torch.arange(len(ids), device=ids.device)
    return found


def head_ce(
    states: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    chunk: int = 1024,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the cross-entropy with one token per position: the KL from a one-hot distribution.

    Args:
        labels: ids in the draft vocabulary, int64 [N].
        others: as for `head_kl`.

    Returns:
        the summed loss and the number of positions where the label is the most likely token, both fp32 [].
    """

    def one_hot(ids: torch.Tensor) -> torch.Tensor:  # [c] -> logits [c, D]
        logits = torch.full((len(ids), len(weight)), -1e4, device=ids.device)
        return logits.scatter_(1, ids[:, None], 0.0)

    return head_kl(states, weight, labels, one_hot, chunk, dtype)
