"""The DeepSpeed file of a training: it must agree with the recipe, which fills in what it leaves out."""

import json
from typing import TYPE_CHECKING, Any

from drafttrain.utils.errors import UserError, brief
from drafttrain.utils.files import read_json

if TYPE_CHECKING:
    from drafttrain.training.config import TrainingConfig


FILLED = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
FILLED += ("gradient_clipping",)


def whole_settings(path: str) -> dict[str, Any]:
    """Return the settings of a checked DeepSpeed file, with "auto" for those that it leaves to the recipe:
    without a key DeepSpeed would take a default of its own, or fail."""
    settings = read_json(path)
    zero = {"stage": 0, **settings.get("zero_optimization", {})}
    bf16 = {"enabled": "auto", **settings.get("bf16", {})}
    return {**dict.fromkeys(FILLED, "auto"), **settings, "zero_optimization": zero, "bf16": bf16}


def check_deepspeed(config: "TrainingConfig") -> None:
    """Validate the file that `training.deepspeed` names, and the settings that DeepSpeed excludes.

    Raises:
        UserError: muon, which ZeRO excludes; no such file; ZeRO stage 3; an optimizer or a scheduler, or
            values that contradict the recipe.
    """
    if config.optimizer == "muon":
        raise UserError(
            "training.optimizer: must be adamw under DeepSpeed, whose ZeRO cuts the matrices that muon "
            "needs whole, got muon; change it, or launch with torchrun and without training.deepspeed"
        )
    settings = read_json(config.deepspeed)
    zero = settings.get("zero_optimization", {}) if isinstance(settings, dict) else None
    stage = zero.get("stage", 0) if isinstance(zero, dict) else None
    if not isinstance(stage, int) or stage > 2:  # stage 3 scatters weights; a drafter is small
        raise UserError(
            f"{config.deepspeed}: zero_optimization.stage: must be 0, 1 or 2, got {stage}; see "
            "recipes/deepspeed"
        )
    for key in ("optimizer", "scheduler"):
        if key in settings:
            raise UserError(
                f"{config.deepspeed}: {key}: must be left out, as the recipe has its own, got "
                f"{brief(json.dumps(settings[key]), 60)}"
            )
    for kind, known in (("bf16", ("auto", config.bf16)), ("fp16", ("auto", False))):
        found = settings.get(kind, {})
        enabled = found.get("enabled", "auto") if isinstance(found, dict) else found
        if enabled not in known:
            raise UserError(
                f"{config.deepspeed}: {kind}.enabled: must be auto, got {json.dumps(enabled)}; training.bf16 "
                "decides"
            )
    if (size := settings.get("train_batch_size", "auto")) != "auto":
        raise UserError(f"{config.deepspeed}: train_batch_size: must be auto, got {size}")
    own = {
        "train_micro_batch_size_per_gpu": config.rows_per_batch,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "gradient_clipping": config.max_grad_norm,
    }
    for key, value in own.items():
        if (found := settings.get(key, "auto")) not in ("auto", value):
            raise UserError(
                f"{config.deepspeed}: {key}: must be auto, or {value} as in the recipe, got {found}"
            )
