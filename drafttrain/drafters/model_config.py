"""Configuration of a drafter's model, stored beside its weights, and the target that it belongs to."""

import warnings
from typing import Any

from transformers import PretrainedConfig

from drafttrain.data.chat import template_hash
from drafttrain.drafters.config import FORMAT_VERSION, LAYERED, READS_LAST, READS_NONE, DrafterConfig
from drafttrain.target_lm.info import target_info
from drafttrain.target_lm.model import FrozenTarget, block_number
from drafttrain.utils.errors import UserError

SUPPORTED_TARGETS = ("llama", "mistral", "qwen2", "qwen3")
# What two tokenizers rarely read alike: digits, an accent, a symbol, white space.
TOKENIZER_PROBE = "In 2024, naïve 3.14 → f(x):\n\treturn"


def check_target(drafter: DrafterConfig, target: FrozenTarget) -> None:
    """Refuses what no drafter of this target can be.

    Raises:
        UserError: the key and its remedy.
    """
    if target.config.model_type not in SUPPORTED_TARGETS:
        raise UserError(
            f"{target.name} is a {target.config.model_type} model; {drafter.kind} drafters are for "
            f"{', '.join(SUPPORTED_TARGETS)}: choose such a target"
        )
    drafter.check()
    n = target.n_blocks
    tapped = drafter.tapped_blocks if drafter.kind == "edd" else []
    init = [drafter.init] if drafter.kind in LAYERED else []
    for key, blocks in (("tapped_blocks", tapped), ("init", init)):
        for block in blocks:
            is_last_state = key == "tapped_blocks" and block == n
            if block != "random" and not -n <= block < n and not is_last_state:
                raise UserError(f"drafter.{key}: {target.name} has blocks {-n} to {n - 1}, not {block}")
    heads = target.config.num_attention_heads
    if drafter.kv_heads is not None and heads % drafter.kv_heads:
        divisors = ", ".join(str(n) for n in range(1, heads + 1) if not heads % n)
        raise UserError(
            f"drafter.kv_heads is {drafter.kv_heads}: {target.name} has {heads} heads, so name one of "
            f"{divisors}"
        )


def read_blocks(drafter: DrafterConfig, n_blocks: int) -> list[int]:
    """Blocks of a target of so many whose outputs this kind reads; `n_blocks` stands for the last hidden
    state, after the final norm."""
    if drafter.kind in READS_NONE:
        return []
    if drafter.kind in READS_LAST:
        return [n_blocks]
    return [block_number(block, n_blocks) for block in drafter.tapped_blocks]


class DraftModelConfig(PretrainedConfig):
    """Shape of a drafter and of the target it belongs to; each kind has a model type of its own.

    Attributes:
        tapped_blocks: target blocks that it reads; the number of blocks stands for the last hidden state.
    """

    model_type = "drafttrain"

    def __init__(
        self,
        format_version: int = FORMAT_VERSION,
        target: dict[str, Any] | None = None,
        tapped_blocks: list[int] | None = None,
        layers: int = 1,
        hidden_size: int = 64,
        intermediate_size: int = 128,
        num_attention_heads: int = 4,
        num_key_value_heads: int = 2,
        head_dim: int | None = None,
        hidden_act: str = "silu",
        rms_norm_eps: float = 1e-5,
        attention_bias: bool = False,
        output_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        rope_parameters: dict[str, Any] | None = None,
        max_position_embeddings: int = 2048,
        target_vocab_size: int = 512,
        draft_vocab_size: int = 512,
        train_embeddings: bool = False,
        train_head: bool = True,
        heads: int = 5,
        noise: float = 0.1,
        input_norms: bool = False,
        anchor: bool = False,
        training: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.format_version = format_version
        self.target = target or {}
        self.tapped_blocks = list(tapped_blocks or [])
        self.layers = layers
        self.hidden_size, self.intermediate_size = hidden_size, intermediate_size
        self.num_attention_heads, self.num_key_value_heads = num_attention_heads, num_key_value_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.hidden_act, self.rms_norm_eps = hidden_act, rms_norm_eps
        self.attention_bias, self.output_bias, self.mlp_bias = attention_bias, output_bias, mlp_bias
        self.qk_norm = qk_norm
        self.rope_parameters = rope_parameters or {"rope_type": "default", "rope_theta": 10000.0}
        self.max_position_embeddings = max_position_embeddings
        self.target_vocab_size, self.draft_vocab_size = target_vocab_size, draft_vocab_size
        self.train_embeddings, self.train_head = train_embeddings, train_head
        self.heads, self.noise, self.input_norms, self.anchor = heads, noise, input_norms, anchor
        self.training = training or {}
        super().__init__(**kwargs)

    @classmethod
    def for_target(
        cls, target: FrozenTarget, drafter: DrafterConfig, draft_vocab_size: int
    ) -> "DraftModelConfig":
        """The target's own layer shape, rope fields included.

        Raises:
            UserError: the target's layers are not of the Llama or Qwen kind, or it has no such block.
        """
        check_target(drafter, target)
        config, attention = target.config, target.blocks[0].self_attn
        return cls(
            target=identity(target),
            tapped_blocks=read_blocks(drafter, target.n_blocks),
            layers=drafter.layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
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
            draft_vocab_size=draft_vocab_size,
            train_embeddings=drafter.train_embeddings,
            train_head=drafter.train_head,
            heads=drafter.heads,
            noise=drafter.noise,
            input_norms=drafter.input_norms,
            anchor=drafter.anchor,
        )


def target_kv_heads(config: PretrainedConfig) -> int:
    """Heads of keys and values in a target's layers."""
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def identity(target: FrozenTarget) -> dict[str, Any]:
    """What a drafter remembers of its target, to refuse another one."""
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
    """Refuses a target of another shape or whose tokenizer gives other ids.

    Other weights, a grown vocabulary or another chat template only cost acceptance, so they are warned of:
    fine-tuned copies of a target may keep its drafter.

    Raises:
        UserError: it is another target.
    """
    found = identity(target)
    name = made_for.get("name")
    for key in ("architecture", "hidden_size", "blocks", "vocab_size"):
        if made_for.get(key) != found[key]:
            raise UserError(
                f"this drafter was made for {name} with {key} {made_for.get(key)}, and {target.name} has "
                f"{found[key]}: load the target it was trained for"
            )
    if made_for.get("probe_ids") != found["probe_ids"]:
        raise UserError(
            f"this drafter was made for {name}, whose tokenizer reads {TOKENIZER_PROBE!r} as "
            f"{made_for.get('probe_ids')}; that of {target.name} reads {found['probe_ids']}: load the target "
            "it was trained for"
        )
    others = [key for key in ("weights", "tokenizer", "template") if made_for.get(key) != found[key]]
    if others:
        warnings.warn(
            f"{' and '.join(others)} of {target.name} are not those the drafter was trained for ({name}): "
            "output stays exact, acceptance may be lower",
            stacklevel=3,
        )
