"""Shape of an EDD drafter, and which target it belongs to."""

import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from drafttrain.corpus.chat import template_hash
from drafttrain.errors import UserError
from drafttrain.files import read_json
from drafttrain.target.frozen import FrozenTarget
from drafttrain.target.store import target_info

FORMAT_VERSION = 1
# What two tokenizers rarely read alike: digits, an accent, a symbol, white space.
TOKENIZER_PROBE = "In 2024, naïve 3.14 → f(x):\n\treturn"
SUPPORTED_TARGETS = ("llama", "mistral", "qwen2", "qwen3")


@dataclass
class DrafterConfig:
    """What is chosen about an EDD drafter.

    Attributes:
        tapped_blocks: target blocks whose outputs are the soft prompts, from 0; negative counts from the end.
            Several are joined by a trained projection.
        layers: decoder layers; 1 is the paper's.
        draft_vocab_size: how many of the target's tokens can be drafted: the most frequent trained tokens of
            the corpus. null: all.
        init: "random", or the number of the target block that the layers start from (negative from the end).
        train_embeddings: train the token embeddings instead of reading the target's.
        train_head: train the LM head, which starts from the target's.
    """

    tapped_blocks: list[int] = field(default_factory=lambda: [-4])
    layers: int = 1
    draft_vocab_size: int | None = 8192
    init: str | int = "random"
    train_embeddings: bool = False
    train_head: bool = True

    def check(self) -> None:
        """Refuses what no drafter can be, whatever the target.

        Raises:
            UserError: the key and its remedy.
        """
        if self.layers < 1:
            raise UserError(f"drafter.layers is {self.layers}: a drafter has at least 1")
        if not self.tapped_blocks:
            raise UserError("drafter.tapped_blocks is empty: name a block, such as [-4]")
        if self.draft_vocab_size is not None and self.draft_vocab_size < 1:
            raise UserError(
                f"drafter.draft_vocab_size is {self.draft_vocab_size}: name one above 0, or null for all "
                "of the target's tokens"
            )
        if isinstance(self.init, str) and self.init != "random":
            raise UserError(f"drafter.init is {self.init}: it must be random or the number of a target block")

    def check_target(self, target: FrozenTarget) -> None:
        """Refuses what no drafter of this target can be.

        Raises:
            UserError: the key and its remedy.
        """
        if target.config.model_type not in SUPPORTED_TARGETS:
            raise UserError(
                f"{target.name} is a {target.config.model_type} model; EDD drafters are for "
                f"{', '.join(SUPPORTED_TARGETS)}: choose such a target"
            )
        self.check()
        n = target.n_blocks
        for key, blocks in (("tapped_blocks", self.tapped_blocks), ("init", [self.init])):
            for block in blocks:
                if block != "random" and not -n <= block < n:
                    raise UserError(f"drafter.{key}: {target.name} has blocks {-n} to {n - 1}, not {block}")


class EddConfig(PretrainedConfig):
    """Shape of an EDD drafter and of the target it belongs to."""

    model_type = "drafttrain_edd"

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
        training: dict[str, Any] | None = None,
        **kwargs: Any,
    ):
        self.format_version = format_version
        self.target = target or {}
        self.tapped_blocks = list(tapped_blocks or [0])
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
        self.training = training or {}
        super().__init__(**kwargs)

    @classmethod
    def for_target(cls, target: FrozenTarget, drafter: DrafterConfig, draft_vocab_size: int) -> "EddConfig":
        """The target's own layer shape, rope fields included.

        Raises:
            UserError: the target's layers are not of the Llama or Qwen kind, or it has no such block.
        """
        drafter.check_target(target)
        config, attention = target.config, target.blocks[0].self_attn
        return cls(
            target=identity(target),
            tapped_blocks=[block % target.n_blocks for block in drafter.tapped_blocks],
            layers=drafter.layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
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
        )


def read_config(folder: str | os.PathLike) -> dict[str, Any]:
    """The `config.json` of a drafter's folder.

    Raises:
        UserError: there is none, or it is not that of an EDD drafter of this format.
    """
    config = read_json(Path(folder) / "config.json")
    kind = config.get("model_type") if isinstance(config, dict) else "broken"
    if kind != EddConfig.model_type:
        raise UserError(f"{folder}: holds a {kind} model; give the folder of an EDD drafter or of its bundle")
    if config.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{folder}: drafter format {config.get('format_version')}, and this version reads "
            f"{FORMAT_VERSION}; export it again"
        )
    if not isinstance(config.get("target"), dict):
        raise UserError(f"{folder}/config.json: does not say which target it is for; export it again")
    return config


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
