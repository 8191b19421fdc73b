"""Measure the speed of training steps."""

from dataclasses import replace
from pathlib import Path

from transformers import PrinterCallback

from drafttrain.drafters.model import DraftModel
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.training.config import TrainingConfig
from drafttrain.training.packing import PackedRows
from drafttrain.training.train import emphasis_for, new_optimizer, settle_bf16, training_arguments
from drafttrain.training.trainer import DraftTrainer


def train_some(
    config: TrainingConfig,
    drafter: DraftModel,
    target: FrozenTarget,
    rows: PackedRows,
    steps: int,
    seed: int,
    folder: Path,
) -> float:
    """Train for `steps` optimizer steps; return their tokens per second, from the training log."""
    config = replace(
        settle_bf16(config, target),
        max_steps=steps + 1,
        logging_steps=1,
        seed=seed,
        report_to="none",
        deepspeed=None,
        warmup_steps=0,
    )
    arguments = training_arguments(config, folder / "trainer", target.device)
    arguments.eval_strategy = arguments.save_strategy = "no"
    trainer = DraftTrainer(
        model=drafter,
        args=arguments,
        train_dataset=rows,
        optimizers=(new_optimizer(config, drafter), None),
        target=target,
        block_length=tuple(config.block_length),
        kl_chunk=config.kl_chunk,
        mask_seed=seed,
        rate=lambda step: 1.0,
        loss=config.loss,
        emphasis=emphasis_for(config, drafter),
        evaluate_drafter=lambda drafter: {},
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "tokens_per_second" in entry]
    timed = logged[1:]  # the first step includes setup
    return sum(e["tokens"] for e in timed) / sum(e["tokens"] / e["tokens_per_second"] for e in timed)
