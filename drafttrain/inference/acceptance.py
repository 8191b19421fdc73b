"""Acceptance rules: which drafted nodes the target would have produced itself, and the token after them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafttrain.inference.params import SamplingParams
from drafttrain.kernels.maximum import first_maximum
from drafttrain.trees.tree import TokenTree


@dataclass
class Accepted:
    """The outcome of one verification.

    Attributes:
        path: accepted nodes of each row from the root on, int64 [B, m]; shorter paths are padded with any
            nodes of the tree.
        counts: length of each path, root included, int64 [B]; m is the largest.
        next_token: what the target itself emits after the path, int64 [B].
    """

    path: torch.Tensor
    counts: torch.Tensor
    next_token: torch.Tensor

    @classmethod
    def of(cls, paths: Sequence[Sequence[int]], tokens: Sequence[int], device: torch.device) -> "Accepted":
        """Build the outcome from one path per row, padded to the longest, and the tokens after the paths."""
        longest = max(map(len, paths))
        return cls(
            torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths], device=device),  # [B, m]
            torch.tensor([len(path) for path in paths], device=device),
            torch.tensor(tokens, device=device),
        )


class AcceptanceRule(ABC):
    """Decides which nodes of a tree are accepted, by the target's logits after each node."""

    @abstractmethod
    def __call__(self, tree: TokenTree, logits: torch.Tensor) -> Accepted:
        """Return the accepted path of each row and the target's own token after it.

        Args:
            logits: of the target after each node, [B, n, V].
        """

    def add(self, params: SamplingParams) -> None:
        """Register the sampling parameters of the next prompt; does nothing if a rule needs none."""

    def set_active(self, numbers: Sequence[int]) -> None:
        """Set the prompts that the rows of the next trees belong to; does nothing if a rule needs none."""


class AcceptGreedy(AcceptanceRule):
    """Accept the longest path whose every token is the target's most probable one (temperature 0).

    Among equal logits the smallest token id wins, in drafting and in plain decoding alike.
    """

    def __call__(self, tree: TokenTree, logits: torch.Tensor) -> Accepted:
        choices = first_maximum(logits)  # [B, n]
        if tree.width == 1:  # plain decoding
            return Accepted(torch.zeros_like(choices), torch.ones_like(tree.sizes), choices[:, 0])
        return Accepted(*tree.follow(choices))


accept_greedy = AcceptGreedy()


def rule_for(sampling: Sequence[SamplingParams], draws: bool) -> AcceptanceRule:
    """Return the rule that is exact for these sampling parameters, which are given per prompt.

    Args:
        draws: whether candidates are drawn at random (`Proposer.draws`).
    """
    drawn = draws or any(params.temperature for params in sampling)
    return sampling_rule(sampling, draws) if drawn else accept_greedy


def sampling_rule(sampling: Sequence[SamplingParams], draws: bool) -> AcceptanceRule:
    """Return the exact rule that can sample at any temperature; arguments as `rule_for`."""
    # imported here: greedy decoding needs neither module
    if not draws:
        from drafttrain.inference.matching import AcceptMatching

        return AcceptMatching(sampling)
    from drafttrain.inference.rejection import RejectionSampling

    return RejectionSampling(sampling)
