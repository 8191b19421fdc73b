"""The transformers `Trainer` with a frozen target beside the model, so that checkpoints, resume, gradient
accumulation, bf16, DeepSpeed and wandb come from the library.

Added are the loss; block masks and EAGLE's noise seeded by (seed, step, row of the step), so that a resumed
run draws what the interrupted one would have drawn, and a step draws the same for any split over ranks and
accumulation (only a small LM's dropout uses the process's random state); and an evaluation that decodes.
"""

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers import Trainer

from drafttrain.drafters.model import DraftModel
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.training.attention import block_attention
from drafttrain.training.losses import head_kl
from drafttrain.training.masks import BlockLayout, random_blocks, whole_documents
from drafttrain.utils.errors import UserError

if TYPE_CHECKING:
    from drafttrain.training.emphasis import Emphasizing

BROKEN_BATCHES = 3  # in a row without a finite state, after which training stops


@dataclass
class DraftLoss:
    """Sums over a batch.

    Attributes:
        total: the loss.
        kl: forward KL (or the loss that `loss` names) of the first prediction, the next draft token.
        agree: number of its positions where the argmaxes agree.
        positions: number of its positions; with loss "ce", those whose token can be drafted.
    """

    total: torch.Tensor
    kl: torch.Tensor
    agree: torch.Tensor
    positions: int


def draft_loss(
    model: Callable[..., torch.Tensor],
    drafter: DraftModel,
    target: FrozenTarget,
    batch: dict[str, torch.Tensor],
    layout: BlockLayout | None,
    chunk: int,
    bf16: bool,
    loss: str = "kl",
    emphasis: "Emphasizing | None" = None,
) -> DraftLoss:
    """Return the loss of a drafter on a batch, summed over its trained positions.

    Args:
        model: the drafter to call: wrapped by DDP or DeepSpeed, or itself.
        drafter: the bare drafter, for its head and its vocabulary.
        batch: rows of `PackedRows`, stacked, with the target's states.
        layout: the blocks of this step, for drafters with soft prompts.
        chunk: positions whose logits exist at once.
        bf16: compute the drafter in bf16 (autocast); the target keeps its own dtype.
        loss: `training.loss`; "ce" leaves out the text's tokens outside the draft vocabulary.
        emphasis: creates the emphasis of trained positions and blocks; None: no emphasis.
    """
    wanted = batch["loss_mask"].bool()  # [B, T]
    if drafter.soft_prompts:
        batch = {**batch, "block_start": layout.block_start}
    else:
        layout = whole_documents(batch["document_start"], drafter.first_token)
    with torch.autocast(wanted.device.type, torch.bfloat16, enabled=bf16):
        attend = block_attention(layout) if drafter.attends else None
        predictions = drafter.predictions(model, batch, attend, wanted)
    draft_rows, bias = target.lm_head.weight[drafter.draft_to_target], target.lm_head.bias  # [D, H], [V]
    bias = None if bias is None else bias[drafter.draft_to_target]  # [D]
    next_ids, divergence, emphasized = None, None, emphasis and emphasis(wanted, layout)
    if loss == "ce":
        from drafttrain.training.label_loss import draft_ids, head_ce  # for an ablation

        next_ids = draft_ids(drafter, target.vocab_size)[batch["input_ids"].roll(-1, 1)]  # [B, T]

    if loss == "acceptance":
        from drafttrain.training.acceptance_loss import neg_log_acceptance as divergence

    def teacher_logits(final: torch.Tensor) -> torch.Tensor:
        return target.scale_logits(F.linear(final, draft_rows, bias))  # [c, D]

    parts = []
    for prediction in predictions:
        states, head = prediction.states, prediction.head  # [N, H], [D, H]
        teacher = batch["final"][prediction.rows].to(target.dtype)  # [N, H]
        dtype = torch.bfloat16 if bf16 else head.dtype
        if next_ids is None:
            kl, agree = head_kl(states, head, teacher, teacher_logits, chunk, dtype, emphasized, divergence)
        else:
            ids = next_ids[prediction.rows]  # [N], -1 for tokens that cannot be drafted
            known = ids >= 0
            kl, agree = head_ce(states[known], head, ids[known], chunk, dtype)
        total = prediction.weight * kl
        if prediction.state_weight:
            distance = F.smooth_l1_loss(states.float(), teacher.float(), reduction="none")  # [N, H]
            total = total + prediction.state_weight * distance.mean(-1).sum()
        judged = len(states) if next_ids is None else int(known.sum())
        parts.append(DraftLoss(total, kl.detach(), agree, judged))
    return replace(parts[0], total=sum(part.total for part in parts))


def with_states(target: FrozenTarget, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the batch with `tapped` [B, T, K·H] and `final` [B, T, H]: stored ones, or from a forward of the
    target. Tokens whose states are NaN or infinite are not trained; stored states are finite.
    """
    if "tapped" in batch:
        return batch
    states = target.encode(batch["input_ids"], batch["document_start"])
    batch = {**batch, "tapped": states.tapped, "final": states.final}
    finite = states.tapped.isfinite().all(-1) & states.final.isfinite().all(-1)  # [B, T]
    if not finite.all():
        batch["loss_mask"] = batch["loss_mask"] * finite
        for name in ("tapped", "final"):  # a masked NaN is still NaN in attention
            batch[name] = batch[name].masked_fill(~finite[:, :, None], 0)
    return batch


def mean_loss(history: list[dict[str, float]]) -> float:
    """Return the mean loss of all optimizer steps of a log, each line being the mean since the one before."""
    lines = [(0, 0.0), *((entry["step"], entry["loss"]) for entry in history if "loss" in entry)]
    total = sum((step - before) * loss for (before, _), (step, loss) in pairwise(lines))
    return total / max(lines[-1][0], 1)


class DraftTrainer(Trainer):
    """Trainer of a drafter, with a frozen target that stays outside the trained module.

    Args:
        target: the frozen target.
        block_length: shortest and longest block.
        kl_chunk: positions whose logits exist at once.
        mask_seed: seed of the block masks and of EAGLE's noise.
        rate: maps the number of optimizer steps done to a factor on the learning rate.
        loss, emphasis: as for `draft_loss`.
        evaluate_drafter: called at each evaluation; the names of its metrics get the prefix "eval_".
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
        evaluate_drafter: Callable[[DraftModel], dict[str, float]],
        loss: str = "kl",
        emphasis: "Emphasizing | None" = None,
        **kwargs: Any,
    ):
        super().__init__(*args, **kwargs)
        self.target, self.block_length, self.kl_chunk = target, block_length, kl_chunk
        self.mask_seed, self.rate, self.evaluate_drafter = mask_seed, rate, evaluate_drafter
        self.loss, self.emphasis = loss, emphasis
        self.model_accepts_loss_kwargs = True
        self._forwards = (-1, 0)  # optimizer step, forward passes of this process in it so far
        # agreements, trained positions, tokens and positions without finite states since the last log line
        self._sums = torch.zeros(4, dtype=torch.float64, device=self.args.device)
        self._broken = 0  # batches in a row without any finite state
        self._logged_at: float | None = None

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> torch.Tensor:
        """Return the trained positions of a whole optimizer step, over accumulated batches and ranks; the few
        without finite states are counted as well."""
        n = sum(batch["loss_mask"].sum() for batch in batch_samples).to(device)
        return self.accelerator.gather(n).sum() if self.args.world_size > 1 else n

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None):
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer or self.optimizer, self.rate)
        return self.lr_scheduler

    def _row_seeds(self, n_rows: int) -> list[int]:
        """Return a seed for each row of the next batch, from the step: nothing to save or restore."""
        step = self.state.global_step
        number = self._forwards[1] if self._forwards[0] == step else 0
        self._forwards = (step, number + 1)
        # a rank gets every world-size-th batch of the step
        batch = number * self.args.world_size + self.args.process_index
        first = batch * self.args.per_device_train_batch_size
        return [zlib.crc32(f"{self.mask_seed} {step} {first + i}".encode()) for i in range(n_rows)]

    def _layout(self, document_start: torch.Tensor, seeds: list[int]) -> BlockLayout:
        """Draw the blocks of a batch, each row's from its own generator."""
        rows = []
        for i, seed in enumerate(seeds):
            generator = torch.Generator().manual_seed(seed)
            rows.append(random_blocks(document_start[i : i + 1], *self.block_length, generator).block_start)
        return BlockLayout(document_start, torch.cat(rows))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        if self._logged_at is None:
            self._logged_at = time.perf_counter()
        seeds = self._row_seeds(len(inputs["document_start"]))
        layout = self._layout(inputs["document_start"], seeds) if self.model.soft_prompts else None
        wanted = inputs["loss_mask"].sum()
        inputs = {**with_states(self.target, inputs), "row_seeds": torch.tensor(seeds)}
        trained = inputs["loss_mask"].sum()
        self._refuse_broken(bool((trained == 0) & (wanted > 0)))
        how = self.kl_chunk, self.args.bf16, self.loss, self.emphasis
        batch_loss = draft_loss(model, self.model, self.target, inputs, layout, *how)
        loss = batch_loss.total
        if not torch.isfinite(loss):
            raise UserError(
                f"loss: must be finite, got {loss.item()} at step {self.state.global_step}; lower "
                "training.lr, or look for damaged weights of the target; earlier checkpoints are good"
            )
        positions = torch.full_like(trained, batch_loss.positions)
        self._sums += torch.stack([batch_loss.agree, positions, inputs["n_tokens"].sum(), wanted - trained])
        return loss / num_items_in_batch.clamp(min=1) * self.accelerator.num_processes

    def _refuse_broken(self, is_broken: bool) -> None:
        """Raise UserError after `BROKEN_BATCHES` batches in a row without finite states."""
        self._broken = self._broken + 1 if is_broken else 0
        if self._broken == BROKEN_BATCHES:
            raise UserError(
                f"{self.target.name}: must give finite states, got NaN or infinity for all tokens of "
                f"{BROKEN_BATCHES} batches in a row; look for damaged weights of the target"
            )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add top-1 agreement, tokens and tokens per second over all ranks to each training log line."""
        if "loss" in logs:
            sums = self._sums
            if self.args.world_size > 1:
                sums = self.accelerator.gather(sums[None]).sum(0)
            agree, positions, tokens, not_finite = sums.tolist()
            now = time.perf_counter()
            logs["top1_agreement"] = round(agree / max(positions, 1), 4)
            logs["tokens"] = int(tokens)
            logs["tokens_per_second"] = round(tokens / (now - self._logged_at), 1)
            if not_finite:
                logs["not_finite"] = int(not_finite)
            self._sums.zero_()
            self._logged_at = now
        if "train_loss" in logs:  # the Trainer's own counts only steps since a resume
            logs = {**logs, "train_loss": mean_loss(self.state.log_history)}
            logs.pop("total_flos", None)  # 0: a frozen target is not counted
        super().log(logs, start_time)

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """Measure held-out KL and, with the decode loop, accept_len; the random state is unchanged."""
        started = time.perf_counter()
        training = self.model.training
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            self.model.eval()
            metrics = self.evaluate_drafter(self.model)
            self.model.train(training)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        if self._logged_at is not None:
            self._logged_at += time.perf_counter() - started  # evaluation does not count as training time
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics
