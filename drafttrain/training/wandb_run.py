"""A training's run in Weights & Biases."""

import os
from pathlib import Path

from drafttrain.training.config import TrainingConfig


def start_wandb(config: TrainingConfig, out: Path):
    """Start a run in `out/.wandb`, hidden because no later stage depends on it.

    WANDB_PROJECT, WANDB_MODE and the like in the environment have their usual meaning.
    """
    import wandb

    (out / ".wandb").mkdir(parents=True, exist_ok=True)  # wandb prefers this folder where it exists
    return wandb.init(
        project=os.environ.get("WANDB_PROJECT", "drafttrain"),
        name=os.environ.get("WANDB_NAME", out.resolve().parent.name),
        mode=os.environ.get("WANDB_MODE", config.wandb_mode),
        dir=out,
    )
