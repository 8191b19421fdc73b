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
        path: accepted nodes of each row from the root on, int64 [B, m]; rows shorter than m are padded with
            other nodes of the tree.
        counts: length of each path, root included, int64 [B]; m is the largest.
        next_token: what the target itself emits after the path, int64 [B].
    """

    path: torch.Tensor
    counts: torch.Tensor
    next_token: torch.Tensor

    @classmethod
    def of(cls, paths: Sequence[Sequence[int]], tokens: Sequence[int], device: torch.device) -> "Accepted":
        """Return the paths of rows, of any lengths, and the tokens after them."""
        longest = max(map(len, paths))
        return cls(
            torch.tensor([[*path, *[0] * (longest - len(path))] for path in paths], device=device),  # [B, m]
            torch.tensor([len(path) for path in paths], device=device),
            torch.tensor(tokens, device=device),
        )


class AcceptanceRule(ABC):
    """Compare trees with the target's logits after each of their nodes."""

    @abstractmethod
    def __call__(self, tree: TokenTree, logits: torch.Tensor) -> Accepted:
        """Return the accepted path of each row and the target's own token after it.

        Args:
            logits: of the target after each node, [B, n, V].
        """

    def set_active(self, numbers: Sequence[int]) -> None:
        """Note which prompts the next trees are for; a rule that treats all alike does nothing."""


class AcceptGreedy(AcceptanceRule):
    """Accept the longest path whose every token is the target's most probable one (temperature 0).

    Among equal logits the smallest token id wins, in drafting and in plain decoding alike.
    """

    def __call__(self, tree: TokenTree, logits: torch.Tensor) -> Accepted:
        return follow(tree, first_maximum(logits))


accept_greedy = AcceptGreedy()


def rule_for(sampling: Sequence[SamplingParams], draws: bool) -> AcceptanceRule:
    """Return the exact rule for these parameters, one for each prompt.

    Args:
        draws: whether candidates are drawn at random (`Proposer.draws`).
    """
    drawn = draws or any(params.temperature for params in sampling)
    return sampling_rule(sampling, draws) if drawn else accept_greedy


def sampling_rule(sampling: Sequence[SamplingParams], draws: bool) -> "SamplingRule":
    """Return the exact rule that can sample at any temperature; arguments as `rule_for`."""
    # greedy decoding needs neither
    if not draws:
        from drafttrain.inference.matching import AcceptMatching

        return AcceptMatching(sampling)
    from drafttrain.inference.rejection import RejectionSampling

    return RejectionSampling(sampling)


class SamplingRule(AcceptanceRule):
    """The base of rules that draw.

    Args:
        params: of each prompt; `add` takes those of further prompts.
    """

    def __init__(self, params: Sequence[SamplingParams] = ()):
        self.params = list(params)
        self.emitted = [0] * len(self.params)  # tokens of each prompt so far
        self.numbers: list[int] | None = None
        self.set_active(range(len(self.params)))

    def add(self, params: SamplingParams) -> None:
        """Take the next prompt's parameters."""
        self.params.append(params)
        self.emitted.append(0)

    def set_active(self, numbers: Sequence[int]) -> None:
        """Note which prompts the next trees are for, each named once: draws are counted by prompt."""
        self.numbers = require_different(numbers)


def require_different(numbers: Sequence[int]) -> list[int]:
    """Return numbers, all of them different, as a list.

    Raises:
        ValueError: one of them is named twice.
    """
    if len(set(numbers)) < len(numbers):
        raise ValueError(f"numbers: must differ, got {list(numbers)}; give forked rows numbers of their own")
    return list(numbers)


def follow(tree: TokenTree, choices: torch.Tensor) -> Accepted:
    """Return the longest path whose every token is the target's choice after the node before it.

    Args:
        choices: the target's token after each node, int64 [B, n].
    """
    if tree.width == 1:  # plain decoding
        return Accepted(torch.zeros_like(choices), torch.ones_like(tree.sizes), choices[:, 0])
    # a walk on the host: a tree has some dozens of nodes, and each of torch's operators takes as long
    facts = torch.stack([choices, tree.tokens, tree.parents, tree.depths]).tolist()  # [4, B, n]
    paths = []
    for chosen, tokens, parents, depths in zip(*facts):
        right, leaf = [True], 0
        for node in range(1, tree.width):
            right.append(right[parents[node]] and tokens[node] == chosen[parents[node]])
            if right[node] and depths[node] > depths[leaf]:  # a padding node has depth 0
                leaf = node
        path = [leaf]
        while path[-1]:
            path.append(parents[path[-1]])
        paths.append(path[::-1])
    longest = max(map(len, paths))
    rows = []
    for path, chosen in zip(paths, facts[0]):
        others = [node for node in range(tree.width) if node not in path]
        rows.append([*[*path, *others][:longest], len(path), chosen[path[-1]]])
    columns = torch.tensor(rows, device=choices.device)  # [B, m + 2]
    return Accepted(columns[:, :longest], columns[:, longest], columns[:, longest + 1])
