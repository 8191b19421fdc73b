"""Check that a new drafter fits its target."""

from drafttrain.drafters.config import DrafterConfig
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError

SUPPORTED_TARGETS = ("llama", "mistral", "qwen2", "qwen3")


def check_target(drafter: DrafterConfig, target: FrozenTarget) -> None:
    """Validate a drafter's settings against its target.

    Raises:
        UserError: the target is not supported, or a setting is invalid or does not fit it.
    """
    if target.config.model_type not in SUPPORTED_TARGETS:
        raise UserError(
            f"target.model: must be one of {', '.join(SUPPORTED_TARGETS)} for {drafter.kind} drafters, got "
            f"{target.config.model_type} ({target.name})"
        )
    drafter.check()
    n = target.n_blocks
    tapped = drafter.tapped_blocks if "tapped_blocks" in drafter.settings else []
    init = [] if drafter.init == "random" else [drafter.init]
    for key, blocks, last in (("tapped_blocks", tapped, n), ("init", init, n - 1)):
        for block in blocks:
            if not -n <= block <= last:
                raise UserError(
                    f"drafter.{key}: must be a block of {target.name}, {-n} to {last}, got {block}"
                )
    heads = target.config.num_attention_heads
    if drafter.kv_heads is not None and heads % drafter.kv_heads:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if not heads % n)
        raise UserError(
            f"drafter.kv_heads: must divide the {heads} heads of {target.name} ({divisors}), got "
            f"{drafter.kv_heads}"
        )
