"""Weigh what greedy drafts are judged by: the target's most probable token, positions that a chain of drafts
reaches, and the one where it fails.

A draft counts only if all before it in its block were accepted, and a greedy one is accepted if it is the
target's most probable token. Tokens are those of the draft vocabulary, and a text that was sampled may go on
with another one, so both are approximate. Ours; the EDD paper's loss is the plain KL.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from drafttrain.training.config import TrainingConfig
from drafttrain.training.masks import BlockLayout
from drafttrain.utils.errors import UserError


@dataclass
class Emphasis:
    """Changes the loss of the N positions of a batch, which are seen in order, a chunk after the other.

    Attributes:
        argmax_share: share of the cross-entropy with the target's most probable token in the loss.
        unreached_weight: of positions after one of their block where the most probable tokens differ.
        failed_weight: of that one, the first of its block.
        first: index among the N positions of the first one of each one's block, int64 [N].
    """

    argmax_share: float
    unreached_weight: float
    failed_weight: float
    first: torch.Tensor
    _last_wrong: torch.Tensor | None = field(default=None, repr=False)  # index, int64 []

    def __call__(
        self, start: int, p: torch.Tensor, best: torch.Tensor, right: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the wanted distributions [c, D] and weights [c, 1] of a chunk that begins at `start`.

        Args:
            p: the target's distributions [c, D].
            best: their most probable tokens [c].
            right: whether these are the drafter's as well, bool [c].
        """
        wanted = p
        if self.argmax_share:
            one_hot = torch.zeros_like(p).scatter_(1, best[:, None], 1.0)  # [c, D]
            wanted = p.lerp(one_hot, self.argmax_share)
        index = torch.arange(start, start + len(p), device=p.device)  # [c]
        if start == 0:
            self._last_wrong = index.new_tensor(-1)
        wrong = torch.where(right, -1, index)  # [c]
        before = torch.cat([self._last_wrong[None], wrong]).cummax(0).values  # [1 + c] of all up to each one
        self._last_wrong = before[-1]
        is_reached = before[:-1] < self.first[start : start + len(p)]
        reached = torch.where(right, 1.0, self.failed_weight)
        return wanted, torch.where(is_reached, reached, self.unreached_weight)[:, None]


def first_of_blocks(wanted: torch.Tensor, block_start: torch.Tensor) -> torch.Tensor:
    """Return the index of the first wanted position of each one's block among all that are wanted, int64 [N].

    Args:
        wanted: bool [B, T].
        block_start: row index at which each token's block begins, int64 [B, T].
    """
    before = (wanted.flatten().cumsum(0) - wanted.flatten().long()).view_as(block_start)  # [B, T]
    return before.gather(1, block_start)[wanted]


# Takes which positions are trained, bool [B, T], and their blocks.
Emphasizing = Callable[[torch.Tensor, BlockLayout], Emphasis]


def emphasis_of(config: TrainingConfig, has_blocks: bool) -> Emphasizing:
    """Return what makes the emphasis of each batch.

    Args:
        has_blocks: whether the drafter is trained on blocks of tokens.

    Raises:
        UserError: it is not, or on the text's tokens.
    """
    weights = config.argmax_share, config.unreached_weight, config.failed_weight
    if not has_blocks or config.loss == "ce":
        why = "loss: ce" if has_blocks else "a drafter without blocks (EDD has them)"
        raise UserError(
            "training.argmax_share, training.unreached_weight, training.failed_weight: must be 0, 1 and 1 "
            f"with {why}, got {weights[0]}, {weights[1]} and {weights[2]}"
        )
    return lambda wanted, layout: Emphasis(*weights, first_of_blocks(wanted, layout.block_start))
