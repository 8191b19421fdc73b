"""Validate a drafter during training: its loss on held-out text and, with the decode loop, its accept_len on
fixed prompts that are not of a benchmark."""

from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.utils.data import default_collate

from drafttrain.drafters.model import DraftModel
from drafttrain.inference.decode import decode
from drafttrain.inference.proposer import TreeProposer
from drafttrain.inference.stats import DecodeStats
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.training.masks import random_blocks
from drafttrain.training.packing import PackedRows
from drafttrain.training.trainer import draft_loss, with_states
from drafttrain.trees.chain import ChainPolicy
from drafttrain.utils.errors import UserError

if TYPE_CHECKING:
    from drafttrain.training.config import TrainingConfig

EVAL_ROWS = 16  # packed rows of held-out text for eval_loss
TEXT_PROMPT = 32  # tokens of a plain text that are used as a prompt


class Validation:
    """Metrics of a drafter, on the same text, blocks and prompts at each call.

    loss: KL per position with blocks of `eval_draft_length`.
    top1_agreement: share of the positions where the most likely tokens agree (within the draft vocabulary).
    lost_mass: share of the target's probability outside the draft vocabulary.
    accept_len, accept_len_nonrepeated, repetition: of greedy chains of `eval_draft_length` on the prompts.
    accept_len_error: standard error of accept_len over the prompts.

    Args:
        rows: the corpus's validation split.

    Raises:
        UserError: that split is empty, or no prompt fits.
    """

    def __init__(self, config: "TrainingConfig", target: FrozenTarget, rows: PackedRows):
        if not len(rows):
            raise UserError(
                "corpus: must have a validation split, got none; raise corpus.validation_fraction or add text"
            )
        self.config, self.target, self.rows = config, target, rows
        self.prompts = validation_prompts(config, target, rows)
        self._lost_mass: float | None = None  # constant: target and draft vocabulary do not change

    def __call__(self, drafter: DraftModel) -> dict[str, float]:
        return {**self.held_out(drafter), **self.acceptance(drafter)}

    @torch.no_grad()
    def held_out(self, drafter: DraftModel) -> dict[str, float]:
        config, device = self.config, self.target.device
        length = config.eval_draft_length
        kl = agree = lost = positions = trained = 0.0
        count, used = len(self.rows), min(EVAL_ROWS, len(self.rows))
        for index in (i * count // used for i in range(used)):  # evenly, as rows of long documents come first
            batch = {name: value.to(device) for name, value in default_collate([self.rows[index]]).items()}
            batch = with_states(self.target, batch)
            generator = torch.Generator().manual_seed(index)
            layout = random_blocks(batch["document_start"], length, length, generator)
            loss = draft_loss(drafter, drafter, self.target, batch, layout, config.kl_chunk, bf16=config.bf16)
            wanted = batch["loss_mask"].bool()
            kl, agree = kl + loss.kl.item(), agree + loss.agree.item()
            positions, trained = positions + loss.positions, trained + wanted.sum().item()
            if self._lost_mass is None:
                lost += self._lost(drafter, batch["final"][wanted].to(self.target.dtype))
        positions = max(positions, 1)
        if self._lost_mass is None:
            self._lost_mass = lost / max(trained, 1)
        return {
            "loss": kl / positions,
            "top1_agreement": agree / positions,
            "lost_mass": self._lost_mass,
        }

    def _lost(self, drafter: DraftModel, final: torch.Tensor) -> float:
        """Return the probability outside the draft vocabulary, summed over states [N, H]."""
        total = 0.0
        for part in final.split(self.config.kl_chunk):
            probs = torch.softmax(self.target.head(part).float(), dim=-1)  # [c, V]
            total += (1 - probs[:, drafter.draft_to_target].sum(-1)).sum().item()
        return total

    def acceptance(self, drafter: DraftModel) -> dict[str, float | None]:
        n = len(self.prompts)
        length = min(self.config.eval_draft_length, drafter.max_depth or self.config.eval_draft_length)
        proposer = TreeProposer(drafter, ChainPolicy(length))
        # without those of the prompt
        stats, tokens, steps = DecodeStats(), np.full(n, -1.0), np.full(n, -1.0)
        limit = self.config.eval_new_tokens
        for step in decode(self.target, proposer, self.prompts, limit, stats=stats):
            emitted = np.array([len(own) for own in step.tokens])  # [prompts]
            tokens, steps = tokens + emitted, steps + (emitted > 0)
        return {
            "accept_len": stats.accept_len,
            "accept_len_error": ratio_error(tokens, steps),
            "accept_len_nonrepeated": stats.accept_len_nonrepeated,
            "repetition": stats.repetition,
        }


def ratio_error(numerators: np.ndarray, denominators: np.ndarray) -> float:
    """Return the standard error of Σ numerators / Σ denominators, both [n], over n prompts; 0 for one."""
    n, total = len(numerators), denominators.sum()
    if n < 2 or total == 0:
        return 0.0
    rest = numerators - numerators.sum() / total * denominators
    return float(np.sqrt(n / (n - 1) * (rest**2).sum()) / total)


def validation_prompts(
    config: "TrainingConfig", target: FrozenTarget, rows: PackedRows
) -> list[Sequence[int]]:
    """Return the token ids of the fixed prompts: those of a file, or the beginnings of held-out documents: up
    to the first trained token, or `TEXT_PROMPT` tokens of plain text, which is trained from its start.

    Raises:
        UserError: none fits into the target's positions together with `eval_new_tokens`.
    """
    if config.eval_prompts:
        from drafttrain.data.prompts import read_prompts  # imports the readers of all formats

        prompts = (prompt.token_ids(target.tokenizer) for prompt in read_prompts(config.eval_prompts))
    else:
        prompts = (_beginning(document) for document in rows.corpus.with_format(None))
    limit = target.positions
    fitting = (prompt for prompt in prompts if len(prompt) + config.eval_new_tokens <= limit)
    chosen = list(islice(fitting, config.eval_prompt_limit))
    if not chosen:
        source = config.eval_prompts or "the corpus's validation split"
        raise UserError(
            f"training.eval_new_tokens: must fit after a prompt of {source} into the {limit} positions of "
            f"{target.name}, got {config.eval_new_tokens}; lower it or name other training.eval_prompts"
        )
    return chosen


def _beginning(document: dict[str, list[int]]) -> list[int]:
    start = document["loss_mask"].index(1)
    return document["input_ids"][: start if start > 1 else TEXT_PROMPT]
