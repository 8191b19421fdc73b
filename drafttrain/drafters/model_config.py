"""Configuration of a drafter's model, stored beside its weights, and the target that it belongs to."""

import warnings
from dataclasses import field, fields
from typing import Any

from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafttrain.data.chat import template_hash
from drafttrain.drafters.config import FORMAT_VERSION, DrafterConfig
from drafttrain.target_lm.info import target_info
from drafttrain.target_lm.model import FrozenTarget, block_number
from drafttrain.utils.errors import UserError

LIMITS = {
    "layers": 1000,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_attention_heads": 1 << 12,
}
LIMITS |= {"num_key_value_heads": 1 << 12, "target_vocab_size": 1 << 24, "draft_vocab_size": 1 << 24}
# Text that two tokenizers rarely read alike: digits, an accent, a symbol, white space.
TOKENIZER_PROBE = "In 2024, naïve 3.14 → f(x):\n\treturn"


class DraftModelConfig(PreTrainedConfig):
    """Shape of a drafter and of the target it belongs to; each kind has its own model type. A field with the
    name of a setting of `DrafterConfig` takes its value.

    Attributes:
        reads: target states that the kind reads: "tapped_blocks", "last_state" (after the final norm), or
            None.
        tapped_blocks: target blocks that it reads; the number of blocks means the last hidden state.
    """

    model_type = "drafttrain"
    reads = None

    format_version: int = FORMAT_VERSION
    target: dict[str, Any] = field(default_factory=dict)
    tapped_blocks: list[int] = field(default_factory=list)
    layers: int = 1
    hidden_size: int = 64
    intermediate_size: int = 128
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_parameters: dict[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    max_position_embeddings: int = 2048
    target_vocab_size: int = 512
    draft_vocab_size: int = 512
    train_embeddings: bool = False
    train_head: bool = True
    head_dtype: str | None = None
    layers_dtype: str | None = None
    training: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self, **kwargs: Any):
        for name, most in LIMITS.items():  # a damaged file may ask for any amount of memory
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise ValueError(f"{name}: must be a whole number from 1 to {most}, got {value!r}")
        rope = self.rope_parameters
        for name, value in (("rope_theta", rope.get("rope_theta", 1.0)), ("rms_norm_eps", self.rms_norm_eps)):
            if type(value) not in (int, float) or not 0 < value < 1e15:
                raise ValueError(f"{name}: must be > 0 and < 1e15, got {value!r}")
        if rope.get("rope_type", "default") not in ("default", *ROPE_INIT_FUNCTIONS.keys()):
            raise ValueError(f"rope_type: must be one that transformers has, got {rope['rope_type']!r}")
        if any(type(block) is not int for block in self.tapped_blocks):
            raise ValueError(f"tapped_blocks: must be whole numbers, got {self.tapped_blocks!r}")
        self.head_dim = self.head_dim or self.hidden_size // self.num_attention_heads
        super().__post_init__(**kwargs)

    @classmethod
    def for_target(
        cls, target: FrozenTarget, drafter: DrafterConfig, draft_vocab_size: int
    ) -> "DraftModelConfig":
        """Return the config of a drafter for this target.

        Raises:
            UserError: the target is not supported, or a setting does not fit it (see `check_target`).
        """
        config = cls.shape(target, drafter, draft_vocab_size)
        config.target = identity(target)
        return config

    @classmethod
    def shape(cls, target: FrozenTarget, drafter: DrafterConfig, draft_vocab_size: int) -> "DraftModelConfig":
        """Return the config without the target's identity, for targets without weights. The layers have the
        target's shape, rope fields included.

        Raises:
            UserError: as `for_target`.
        """
        from drafttrain.drafters.check import check_target  # only for new drafters

        check_target(drafter, target)
        config, attention = target.config, target.blocks[0].self_attn
        own = {item.name for item in fields(cls)} & {item.name for item in fields(DrafterConfig)}
        settings = {name: getattr(drafter, name) for name in own}
        settings["tapped_blocks"] = {
            None: [],
            "last_state": [target.n_blocks],
            "tapped_blocks": [block_number(block, target.n_blocks) for block in drafter.tapped_blocks],
        }[cls.reads]
        settings["draft_vocab_size"] = draft_vocab_size
        settings["intermediate_size"] = drafter.intermediate_size or config.intermediate_size
        return cls(
            hidden_size=config.hidden_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=drafter.kv_heads or target_kv_heads(config),
            head_dim=getattr(config, "head_dim", None),
            hidden_act=config.hidden_act,
            rms_norm_eps=config.rms_norm_eps,
            attention_bias=attention.q_proj.bias is not None,
            output_bias=attention.o_proj.bias is not None,
            mlp_bias=target.blocks[0].mlp.gate_proj.bias is not None,
            qk_norm=hasattr(attention, "q_norm"),
            rope_parameters=dict(config.rope_parameters),
            max_position_embeddings=config.max_position_embeddings,
            target_vocab_size=target.vocab_size,
            **settings,
        )


def target_kv_heads(config: PreTrainedConfig) -> int:
    """Return the number of key and value heads in a target's layers."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def identity(target: FrozenTarget) -> dict[str, Any]:
    """Return the facts about its target that a drafter stores, to refuse another one."""
    info = target_info(target)
    return {
        "name": target.name,
        "architecture": info.architecture,
        "hidden_size": info.hidden_size,
        "blocks": info.n_blocks,
        "vocab_size": info.vocab_size,
        "weights": info.weights,
        "tokenizer": info.tokenizer,
        "template": template_hash(target.tokenizer) if target.tokenizer else "none",
        "probe_ids": target.tokenizer(TOKENIZER_PROBE)["input_ids"] if target.tokenizer else [],
    }


def check_identity(made_for: dict[str, Any], target: FrozenTarget) -> None:
    """Validate that a target has the shape, and its tokenizer the ids, that a drafter was made for.

    Other weights, tokens added to the tokenizer or another chat template only reduce acceptance, so they give
    a warning: fine-tuned copies of a target may keep its drafter.

    Raises:
        UserError: it is another target.
    """
    found = identity(target)
    name = made_for.get("name")
    for key in ("architecture", "hidden_size", "blocks", "vocab_size"):
        if made_for.get(key) != found[key]:
            raise UserError(
                f"{target.name}: {key} must be {made_for.get(key)}, as of the drafter's target {name}, got "
                f"{found[key]}; load the target it was trained for"
            )
    if made_for.get("probe_ids") != found["probe_ids"]:
        raise UserError(
            f"{target.name}: its tokenizer must read {TOKENIZER_PROBE!r} as {made_for.get('probe_ids')}, as "
            f"that of the drafter's target {name}, got {found['probe_ids']}; load the target "
            "it was trained for"
        )
    others = [key for key in ("weights", "tokenizer", "template") if made_for.get(key) != found[key]]
    if others:
        warnings.warn(
            f"{' and '.join(others)} of {target.name} differ from what the drafter was trained for ({name}): "
            "output stays exact, acceptance may be lower",
            stacklevel=3,
        )
