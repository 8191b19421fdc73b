"""Check the drafter that a training starts from (`training.init_from`)."""

from typing import Any

from drafttrain.drafters.config import DrafterConfig, kind_of
from drafttrain.training.config import TrainingConfig
from drafttrain.utils.errors import UserError

# settings that a drafter keeps when its training goes on
KEPT = ("kv_heads", "intermediate_size", "train_embeddings", "train_head", "heads", "noise", "input_norms")


def check_continued(config: TrainingConfig, stored: dict[str, Any], drafter_config: DrafterConfig) -> None:
    """Validate that the recipe asks for the kind and shape of the drafter to start from.

    Args:
        stored: the `config.json` of that drafter.

    Raises:
        UserError: it asks for another.
    """
    kind = kind_of(stored)
    if kind != drafter_config.kind or drafter_config.lora_rank is not None:
        asked = "adapters" if kind == drafter_config.kind else drafter_config.kind
        raise UserError(
            f"drafter.kind: must be {kind} without lora_rank, the kind of training.init_from, got {asked}"
        )
    if config.init_draft_vocab_size and "train_head" not in drafter_config.settings:
        raise UserError(
            f"training.init_draft_vocab_size: must be null for a {kind} drafter, whose vocabulary does not "
            f"change, got {config.init_draft_vocab_size}; leave it out"
        )
    if drafter_config.head_dtype and not stored.get("train_head", True):
        raise UserError(
            f"drafter.head_dtype: must be null where training.init_from has the target's head, got "
            f"{drafter_config.head_dtype}; leave it out"
        )
    for key in ("anchor", "head_dtype", "layers_dtype"):
        if config.max_steps == 0 and (value := getattr(drafter_config, key)) and value != stored.get(key):
            raise UserError(
                f"drafter.{key}: must be that of training.init_from, {stored.get(key)}, without training "
                f"(training.max_steps: 0), got {value}; leave it out"
            )
    if config.max_steps == 0 and drafter_config.layers > (there := stored.get("layers", 1)):
        raise UserError(
            f"drafter.layers: must be that of training.init_from, {there}, without training "
            f"(training.max_steps: 0), got {drafter_config.layers}; leave it out"
        )
    defaults = DrafterConfig(kind)
    for key in KEPT:
        asked, default = getattr(drafter_config, key), getattr(defaults, key)
        there = stored.get("num_key_value_heads" if key == "kv_heads" else key, default)
        if key in drafter_config.settings and asked not in (default, there):
            raise UserError(
                f"drafter.{key}: must be {there} as in training.init_from, got {asked}; leave it out"
            )
