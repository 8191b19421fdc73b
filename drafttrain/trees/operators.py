"""Tree operations in torch, for GPUs and without a compiler. Fields are those of `kernels.trees`."""

from collections.abc import Sequence

import torch


def append_layer(
    fields: Sequence[torch.Tensor],
    above: torch.Tensor,
    tokens: torch.Tensor,
    log_probs: torch.Tensor,
    entropies: torch.Tensor | None,
) -> list[torch.Tensor]:
    """Return the fields of trees with one more layer, as `kernels.trees.append_layer` does."""
    *own, old_joint, ancestors = fields
    n, added = ancestors.shape[1], above.shape[1]
    if entropies is None:
        entropies = torch.full_like(log_probs, torch.nan)  # [B, f]
    depths, joint = own[2].gather(1, above) + 1, old_joint.gather(1, above) + log_probs  # [B, f]
    layer = tokens, above, depths, log_probs, entropies, joint
    seen = ancestors.gather(1, above[:, :, None].expand(-1, -1, n))  # [B, f, n]
    itself = torch.eye(added, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)  # [B, f, f]
    upper = torch.nn.functional.pad(ancestors, (0, added))  # [B, n, n + f]
    ancestors = torch.cat([upper, torch.cat([seen, itself], 2)], 1)  # [B, n + f, n + f]
    return [*(torch.cat(pair, 1) for pair in zip((*own, old_joint), layer)), ancestors]


def follow_choices(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    choices: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the longest path of choices in each row, as `TokenTree.follow` does."""
    n = tokens.shape[1]
    right = tokens == choices.gather(1, parents.clamp(min=0))  # [B, n]
    right[:, 0] = True
    wrong = ~(right[:, None] | ~ancestors).all(-1)  # [B, n]: on the path to each node
    # the deepest node, the first among equals; padding has depth 0
    worth = depths * n - torch.arange(n, device=choices.device)  # [B, n]
    leaf = worth.masked_fill(wrong, -n).argmax(1, keepdim=True)  # [B, 1]
    seen = ancestors.gather(1, leaf[:, :, None].expand(-1, -1, n))[:, 0]  # [B, n]
    counts = seen.sum(1)  # [B]
    path = (~seen).byte().argsort(dim=1, stable=True)[:, : int(counts.max())]  # [B, m]
    return path, counts, choices.gather(1, leaf)[:, 0]
