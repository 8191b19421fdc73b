"""Weigh the loss by what decides greedy acceptance: the target's most probable token, the positions that a
chain of drafts reaches, and the one where it fails.

A draft counts only if all before it in its block were accepted, and a greedy draft is accepted if it is the
target's most probable token. Both are approximate: tokens are those of the draft vocabulary, and sampled text
may continue with another token. Ours; the EDD paper's loss is the plain KL.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from drafttrain.training.config import TrainingConfig
from drafttrain.training.masks import BlockLayout
from drafttrain.utils.errors import UserError


@dataclass
class Emphasis:
    """Change to the loss of the N positions of a batch, called chunk by chunk in order.

    Attributes:
        argmax_share: share of the cross-entropy with the target's most probable token in the loss.
        unreached_weight: of positions after the first one of their block where the top-1 tokens differ.
        failed_weight: of that first one.
        first: for each position, the index (of N) of the first position of its block, int64 [N].
    """

    argmax_share: float
    unreached_weight: float
    failed_weight: float
    first: torch.Tensor
    _last_wrong: torch.Tensor | None = field(default=None, repr=False)  # index, int64 []

    def __call__(
        self, start: int, p: torch.Tensor, best: torch.Tensor, right: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the distributions to learn [c, D] and weights [c, 1] of a chunk that begins at `start`.

        Args:
            p: the target's distributions [c, D].
            best: their most probable tokens [c].
            right: whether they are the drafter's as well, bool [c].
        """
        wanted = p
        if self.argmax_share:
            one_hot = torch.zeros_like(p).scatter_(1, best[:, None], 1.0)  # [c, D]
            wanted = p.lerp(one_hot, self.argmax_share)
        index = torch.arange(start, start + len(p), device=p.device)  # [c]
        if start == 0:
            self._last_wrong = index.new_tensor(-1)
        wrong = torch.where(right, -1, index)  # [c]
        before = torch.cat([self._last_wrong[None], wrong]).cummax(0).values  # [1 + c] last wrong one so far
        self._last_wrong = before[-1]
        is_reached = before[:-1] < self.first[start : start + len(p)]
        reached = torch.where(right, 1.0, self.failed_weight)
        return wanted, torch.where(is_reached, reached, self.unreached_weight)[:, None]


def first_of_blocks(wanted: torch.Tensor, block_start: torch.Tensor) -> torch.Tensor:
    """Return for each wanted position the index (of N) of the first one of its block, int64 [N].

    Args:
        wanted: bool [B, T].
        block_start: row index at which each token's block begins, int64 [B, T].
    """
    before = (wanted.flatten().cumsum(0) - wanted.flatten().long()).view_as(block_start)  # [B, T]
    return before.gather(1, block_start)[wanted]


# takes which positions are trained, bool [B, T], and their blocks
Emphasizing = Callable[[torch.Tensor, BlockLayout], Emphasis]


def emphasis_of(config: TrainingConfig, has_blocks: bool) -> Emphasizing:
    """Return the function that creates the emphasis of each batch.

    Args:
        has_blocks: whether the drafter is trained on blocks of tokens.

    Raises:
        UserError: it is not, or the loss is "ce".
    """
    weights = config.argmax_share, config.unreached_weight, config.failed_weight
    if not has_blocks or config.loss == "ce":
        why = "loss: ce" if has_blocks else "a drafter without blocks (EDD has them)"
        raise UserError(
            "training.argmax_share, training.unreached_weight, training.failed_weight: must be 0, 1 and 1 "
            f"with {why}, got {weights[0]}, {weights[1]} and {weights[2]}"
        )
    return lambda wanted, layout: Emphasis(*weights, first_of_blocks(wanted, layout.block_start))
