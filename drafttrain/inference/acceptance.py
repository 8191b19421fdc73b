"""Acceptance rules: which drafted nodes the target would have produced itself, and what it says next."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from drafttrain.inference.sampling import Sampler, SamplingParams
from drafttrain.trees.tree import TokenTree


@dataclass
class Accepted:
    """The outcome of one verification.

    Attributes:
        path: accepted nodes of each row from the root on, int64 [B, m]; rows shorter than m are padded with
            other nodes of the tree.
        counts: length of each path, root included, int64 [B]; m is the largest.
        next_token: what the target itself emits after the path, int64 [B].
    """

    path: torch.Tensor
    counts: torch.Tensor
    next_token: torch.Tensor


# A rule takes the trees and the target's logits [B, n, V] after each node. A node's logits say what follows
# it.
AcceptanceRule = Callable[[TokenTree, torch.Tensor], Accepted]


def accept_greedy(tree: TokenTree, logits: torch.Tensor) -> Accepted:
    """Accepts the longest path whose every token is the target's most probable one (temperature 0).

    Among equal logits the smallest token id wins, in drafting and in plain decoding alike.

    Args:
        tree: the verified trees.
        logits: [B, n, V].
    """
    # max, not argmax: the same first maximum, and several times faster on bf16 CPU tensors
    return follow(tree, logits.max(-1).indices)


class AcceptSampled:
    """Sampling with deterministic candidates (trees of most probable tokens): what the target says after each
    node is drawn from its own distribution, and the path goes on as long as a child is what was drawn.

    Exact, because a draw never depends on the tree, and no rule can accept more of candidates that were not
    drawn themselves: a token is accepted with the target's probability of it. A draw belongs to its position
    in the output (`sampling.uniform`), so the text is that of plain sampling with the same seed.

    One object serves one call of `decode`.

    Args:
        params: of each row.
    """

    def __init__(self, params: Sequence[SamplingParams]):
        self.sampler = Sampler(params)
        self.emitted: torch.Tensor | None = None  # [B]

    def __call__(self, tree: TokenTree, logits: torch.Tensor) -> Accepted:
        if self.emitted is None:
            self.emitted = torch.zeros_like(tree.sizes)
        choices = self.sampler.pick(logits, self.emitted[:, None] + tree.depths)  # [B, n]
        accepted = follow(tree, choices)
        self.emitted = self.emitted + accepted.counts
        return accepted


def follow(tree: TokenTree, choices: torch.Tensor) -> Accepted:
    """The longest path whose every token is what the target says after the node before it.

    Args:
        choices: what the target says after each node, int64 [B, n].
    """
    wanted = choices.gather(1, tree.parents.clamp(min=0))  # [B, n] what the target says after the parent
    matches = (tree.tokens == wanted) | (tree.parents < 0)  # [B, n]
    refuted = (tree.ancestors() & ~matches[:, None]).any(-1)  # [B, n] the node or an ancestor is wrong
    depths = tree.depths.masked_fill(
        refuted, -1
    )  # [B, n]; a padding node has depth 0, like the root before it
    deepest, leaf = depths.max(-1)  # [B]
    rows = torch.arange(len(leaf), device=leaf.device)  # [B]
    on_path = tree.ancestors()[rows, leaf]  # [B, n]
    counts = deepest + 1  # [B]
    order = (~on_path).byte().argsort(dim=1, stable=True)  # [B, n] the path first; by index is by depth
    path = order[:, : int(counts.max())]  # [B, m]
    return Accepted(path, counts, choices[rows, leaf])
