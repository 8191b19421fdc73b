"""What is measured while a drafter trains: its loss on held-out text and, with the shipped decode loop, its real
accept_len on fixed prompts that belong to no benchmark."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.utils.data import default_collate

from drafttrain.corpus.chat import encode_prompt
from drafttrain.corpus.conversation import Message
from drafttrain.drafters.edd import EddModel
from drafttrain.errors import UserError
from drafttrain.evaluation.prompts import read_prompts
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import TreeProposer
from drafttrain.inference.stats import DecodeStats
from drafttrain.target.frozen import FrozenTarget
from drafttrain.training.masks import random_blocks
from drafttrain.training.packing import PackedRows
from drafttrain.training.trainer import draft_kl, target_states
from drafttrain.trees.chain import ChainPolicy

if TYPE_CHECKING:
    from drafttrain.training.stage import TrainingConfig

EVAL_ROWS = 16  # packed rows of held-out text behind eval_loss


class Validation:
    """Called with a drafter, returns its metrics; the same text, blocks and prompts each time.

    `loss` is the KL per position with blocks of `eval_draft_length`, `lost_mass` the share of the target's probability
    that lies outside the draft vocabulary, `accept_len` tokens per target forward of greedy chains.
    """

    def __init__(self, config: "TrainingConfig", target: FrozenTarget, rows: PackedRows):
        self.config, self.target, self.rows = config, target, rows
        self.prompts = validation_prompts(config, target, rows)
        if not len(rows):
            raise UserError("the corpus has no validation split: raise corpus.validation_fraction")

    def __call__(self, drafter: EddModel) -> dict[str, float]:
        return {**self.held_out(drafter), **self.acceptance(drafter)}

    def held_out(self, drafter: EddModel) -> dict[str, float]:
        config, device = self.config, self.target.device
        kl = agree = lost = positions = 0.0
        for index in range(min(EVAL_ROWS, len(self.rows))):
            batch = {k: v.to(device) for k, v in default_collate([self.rows[index]]).items()}
            states = target_states(self.target, batch)
            batch |= {"tapped": states.tapped, "final": states.final}
            generator = torch.Generator().manual_seed(index)
            layout = random_blocks(
                batch["document_start"], config.eval_draft_length, config.eval_draft_length, generator
            )
            with torch.autocast(device.type, torch.bfloat16, enabled=config.bf16):
                loss, same = draft_kl(drafter, drafter, self.target, batch, layout, config.kl_chunk)
            wanted = batch["loss_mask"].bool()
            kl, agree, positions = kl + loss.item(), agree + same.item(), positions + wanted.sum().item()
            lost += self._lost_mass(drafter, states.final[wanted].to(self.target.dtype))
        positions = max(positions, 1)
        return {"loss": kl / positions, "top1_agreement": agree / positions, "lost_mass": lost / positions}

    def _lost_mass(self, drafter: EddModel, final: torch.Tensor) -> float:
        total = 0.0
        for part in final.split(self.config.kl_chunk):
            probs = torch.softmax(self.target.head(part).float(), dim=-1)  # [c, V]
            total += (1 - probs[:, drafter.draft_to_target].sum(-1)).sum().item()
        return total

    def acceptance(self, drafter: EddModel) -> dict[str, float]:
        proposer = TreeProposer(drafter, ChainPolicy(self.config.eval_draft_length))
        stats = DecodeStats()
        for prompt in self.prompts:
            stats += decode_all(self.target, proposer, [prompt], self.config.eval_new_tokens)[1]
        return {
            "accept_len": stats.accept_len,
            "accept_len_fresh": stats.accept_len_fresh,
            "repetition": stats.repetition,
        }


def validation_prompts(config: "TrainingConfig", target: FrozenTarget, rows: PackedRows) -> list[Sequence[int]]:
    """Token ids of the fixed prompts: a file's, or what stands before the first trained token of held-out rows."""
    if config.eval_prompts:
        prompts = read_prompts(config.eval_prompts, limit=config.eval_prompt_limit)
        return [encode_prompt(target.tokenizer, [Message("user", prompt.turns[0])]) for prompt in prompts]
    found: list[Sequence[int]] = []
    for document in rows.corpus.with_format(None):
        start = next((i for i, trained in enumerate(document["loss_mask"]) if trained), 0)
        if start and len(found) < config.eval_prompt_limit:
            found.append(document["input_ids"][:start])
    return found
