"""Base class of proposers without a model."""

import copy
from collections.abc import Sequence

import torch

from drafttrain.inference.proposer import Proposer


class PerSequence(Proposer):
    """Proposer that runs no model and whose state is a list of one item per sequence."""

    reads_alone = True

    def select_rows(self, state: list, rows: torch.Tensor) -> list:
        numbers = rows.tolist()
        return [
            copy.deepcopy(state[row]) if row in numbers[:place] else state[row]
            for place, row in enumerate(numbers)
        ]

    def append_rows(self, state: list, other: list) -> list:
        return [*state, *other]

    def join(self, states: Sequence[list]) -> list:
        return [item for state in states for item in state]

    def split(self, joined: list, states: Sequence[list]) -> None:
        """Do nothing: the items were changed in place."""
