"""Conversion of lists of tokens and parents to trees, and of a batch of trees to a list."""

from collections.abc import Sequence

import torch

from drafttrain.trees.tree import DrawnFrom, TokenTree


def tree_of_lists(
    tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]], device: torch.device
) -> TokenTree:
    """Return trees from the tokens and parents of each row's nodes, in breadth-first order; their
    log-probabilities are all 0."""
    n = max(map(len, tokens))
    rows: list[list[list[int]]] = []
    for row, above in zip(tokens, parents, strict=True):
        depths = [0]
        for parent in above[1:]:
            depths.append(depths[parent] + 1)
        padding = [0] * (n - len(row))
        rows.append([[*row, *padding], [*above, *padding], [*depths, *padding]])
    flat = torch.tensor(rows, device=device)  # [B, 3, n]
    sizes = torch.tensor([len(row) for row in tokens], device=device)  # [B]
    valid = torch.arange(n, device=device) < sizes[:, None]  # [B, n]
    log_probs = torch.full(valid.shape, -torch.inf, device=device).masked_fill(valid, 0.0)  # [B, n]
    entropies = torch.full_like(log_probs, torch.nan)  # [B, n]
    entropies[:, 0] = 0.0
    return TokenTree(*flat.unbind(1), log_probs, entropies, sizes)


def rows_of(trees: TokenTree) -> list[TokenTree]:
    """Return the trees one by one, without padding."""
    if len(trees.sizes) == 1:
        return [trees]
    ancestors, joint, found = trees.ancestors(), trees.joint_log_probs(), []
    for b, n in enumerate(trees.sizes.tolist()):
        row = slice(b, b + 1)
        drawn = trees.drawn_from and DrawnFrom(trees.drawn_from.probs[row, :n], trees.drawn_from.ids[row, :n])
        parts = (trees.tokens, trees.parents, trees.depths, trees.log_probs, trees.entropies, joint)
        fields = [*(part[row, :n] for part in parts), ancestors[row, :n, :n]]
        found.append(TokenTree.of_fields(fields, trees.sizes[row], drawn))
    return found
