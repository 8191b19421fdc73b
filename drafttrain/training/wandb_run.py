"""Log a training to Weights & Biases."""

import os
from pathlib import Path

from drafttrain.training.config import TrainingConfig
from drafttrain.utils.errors import UserError, brief


def start_wandb(config: TrainingConfig, out: Path):
    """Start a run in `out/.wandb`, hidden because no later stage depends on it.

    WANDB_PROJECT, WANDB_MODE and the like in the environment have their usual meaning.

    Raises:
        UserError: wandb cannot start, such as online without a key.
    """
    import wandb

    (out / ".wandb").mkdir(parents=True, exist_ok=True)  # wandb prefers this folder where it exists
    mode = os.environ.get("WANDB_MODE", config.wandb_mode)
    try:
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", "drafttrain"),
            name=os.environ.get("WANDB_NAME", out.resolve().parent.name),
            mode=mode,
            dir=out,
        )
    except wandb.errors.Error as error:
        raise UserError(
            f"training.wandb_mode: must be one that wandb can start, got {mode} ({brief(error)}); run wandb "
            "login, or take offline"
        ) from error
