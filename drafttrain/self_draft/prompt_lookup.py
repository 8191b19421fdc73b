"""Prompt lookup: the tokens that followed the longest recent match of the text's end (Saxena 2023; `generate`
of transformers has it as `prompt_lookup_num_tokens`), a baseline of Self-Draft."""

from dataclasses import dataclass

import torch

from drafttrain.inference.per_sequence import PerSequence
from drafttrain.trees.lists import tree_of_lists
from drafttrain.trees.tree import TokenTree


@dataclass
class PromptLookup(PerSequence):
    """A proposer of chains from the prompt and the accepted text.

    Attributes:
        length: tokens of a chain at most.
        longest: tokens of the longest suffix to match; then one less, down to one.
    """

    length: int = 10
    longest: int = 3

    def new_state(self, batch: int, max_len: int) -> list[list[int]]:
        return [[] for _ in range(batch)]

    def update(
        self, state: list[list[int]], tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor
    ) -> None:
        for text, row, count in zip(state, tokens.tolist(), counts.tolist()):
            text += row[:count]

    def propose(self, state: list[list[int]], root: torch.Tensor) -> TokenTree:
        chains = [[token, *self.continuation([*text, token])] for text, token in zip(state, root.tolist())]
        parents = [list(range(-1, len(chain) - 1)) for chain in chains]
        return tree_of_lists(chains, parents, root.device)

    def continuation(self, text: list[int]) -> list[int]:
        """Return the tokens after the most recent match of the longest suffix of a text."""
        for n in range(min(self.longest, len(text) - 1), 0, -1):
            end = text[-n:]
            for start in range(len(text) - n - 1, -1, -1):
                if text[start : start + n] == end:
                    return text[start + n : start + n + self.length]
        return []
