"""The transformers `Trainer` with a frozen target beside the model, so that checkpoints, resume, accumulation, bf16,
DeepSpeed and wandb come from the library.

What is ours: the loss, block masks keyed by (seed, step, micro-step, rank) so that a resumed run draws what the
interrupted one would have drawn, and an evaluation that decodes for real.
"""

import time
import zlib
from collections.abc import Callable
from typing import Any

import torch
from transformers import Trainer

from drafttrain.drafters.edd import EddModel
from drafttrain.errors import UserError
from drafttrain.target.frozen import FrozenTarget, TargetStates
from drafttrain.training.attention import block_attention
from drafttrain.training.losses import head_kl
from drafttrain.training.masks import BlockLayout, causal_document_mask, random_blocks


def draft_kl(
    model: Callable[..., torch.Tensor],
    drafter: EddModel,
    target: FrozenTarget,
    batch: dict[str, torch.Tensor],
    layout: BlockLayout,
    chunk: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed KL over a batch's trained positions and the number of positions where both argmaxes agree.

    Args:
        model: the drafter as it is called: wrapped by DDP or DeepSpeed, or the drafter itself.
        drafter: the bare drafter, for its head and its vocabulary.
        batch: rows of `PackedRows`, stacked; with `tapped` and `final` the target is not run.
    """
    states = target_states(target, batch)
    wanted = batch["loss_mask"].bool()  # [B, T]
    attend = block_attention(layout)
    drafted = model(batch["input_ids"], states.tapped, batch["positions"], attend, wanted)  # [N, H]
    draft_rows = target.lm_head.weight[drafter.draft_to_target]  # [D, H]

    def teacher_logits(final: torch.Tensor) -> torch.Tensor:
        return target.scale_logits(final @ draft_rows.T)  # [c, D]

    teacher = states.final[wanted].to(target.dtype)  # [N, H]
    return head_kl(drafted, drafter.lm_head.weight, teacher, teacher_logits, chunk)


def target_states(target: FrozenTarget, batch: dict[str, torch.Tensor]) -> TargetStates:
    """Stored states where the batch carries them, else a forward of the target."""
    if "tapped" in batch:
        return TargetStates(tapped=batch["tapped"], final=batch["final"])
    allowed = causal_document_mask(batch["document_start"])
    return target.encode(batch["input_ids"], allowed, batch["positions"])


class DraftTrainer(Trainer):
    """Trains an EDD drafter against a frozen target that stays outside the trained module.

    Args:
        target: the frozen target.
        block_length: shortest and longest block.
        kl_chunk: positions whose logits exist at once.
        mask_seed: seed of the block masks.
        rate: factor on the learning rate for a number of optimizer steps done.
        evaluate_drafter: called at each evaluation; returns metrics whose names start with "eval_".
    """

    loss_is_scaled_for_ga = True  # the loss is divided by the positions of the whole accumulated batch

    def __init__(
        self,
        *args: Any,
        target: FrozenTarget,
        block_length: tuple[int, int],
        kl_chunk: int,
        mask_seed: int,
        rate: Callable[[int], float],
        evaluate_drafter: Callable[[EddModel], dict[str, float]],
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.target, self.block_length, self.kl_chunk = target, block_length, kl_chunk
        self.mask_seed, self.rate, self.evaluate_drafter = mask_seed, rate, evaluate_drafter
        self.model_accepts_loss_kwargs = True
        self._micro_step = (-1, 0)  # optimizer step, forward passes in it so far
        self._sums = torch.zeros(3, dtype=torch.double)  # agreements, trained positions, tokens since the last log
        self._logged_at = time.perf_counter()

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor:
        n = sum(batch["loss_mask"].sum() for batch in batch_samples).to(device)
        return self.accelerator.gather(n).sum() if self.args.world_size > 1 else n

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, self.rate)
        return self.lr_scheduler

    def _layout(self, document_start: torch.Tensor) -> BlockLayout:
        """Blocks drawn from a generator of this step alone: nothing to save, nothing to restore on resume."""
        step = self.state.global_step
        micro = self._micro_step[1] + 1 if self._micro_step[0] == step else 0
        self._micro_step = (step, micro)
        # a rank gets every world-size-th batch, so two ranks draw what one rank draws with doubled accumulation
        number = micro * self.args.world_size + self.args.process_index
        seed = zlib.crc32(f"{self.mask_seed} {step} {number}".encode())
        return random_blocks(document_start, *self.block_length, torch.Generator().manual_seed(seed))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        layout = self._layout(inputs["document_start"])
        loss, agree = draft_kl(model, self.model, self.target, inputs, layout, self.kl_chunk)
        if not torch.isfinite(loss):
            raise UserError(
                f"the loss became {loss.item()} at step {self.state.global_step}: lower training.lr or look for damaged "
                "hidden states; earlier checkpoints are good"
            )
        counts = (agree.item(), inputs["loss_mask"].sum().item(), inputs["n_tokens"].sum().item())
        self._sums += torch.tensor(counts, dtype=torch.double)
        return loss / num_items_in_batch * self.accelerator.num_processes

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds top-1 agreement, tokens and tokens per second over all ranks to each training log line."""
        if "loss" in logs:
            sums = self._sums.float().to(self.args.device)
            if self.args.world_size > 1:
                sums = self.accelerator.gather(sums[None]).sum(0)
            agree, positions, tokens = sums.tolist()
            elapsed = time.perf_counter() - self._logged_at
            logs["top1_agreement"] = round(agree / max(positions, 1), 4)
            logs["tokens"] = int(tokens)
            logs["tokens_per_second"] = round(tokens / elapsed, 1)
            self._sums.zero_()
            self._logged_at = time.perf_counter()
        super().log(logs, start_time)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """Held-out KL and the real accept_len of the shipped decode loop; draws nothing from the global RNG."""
        started = time.perf_counter()
        training = self.model.training
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            self.model.eval()
            metrics = self.evaluate_drafter(self.model)
            self.model.train(training)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self._logged_at += time.perf_counter() - started  # evaluation is no training time
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics
