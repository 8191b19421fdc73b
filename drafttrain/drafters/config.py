"""Shape of a drafter, and which target it belongs to."""

import os
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from transformers import PretrainedConfig

from drafttrain.corpus.chat import template_hash
from drafttrain.errors import UserError
from drafttrain.files import read_json
from drafttrain.target.frozen import FrozenTarget, block_number
from drafttrain.target.store import target_info

FORMAT_VERSION = 1
MODEL_TYPES = tuple(f"drafttrain_{kind}" for kind in ("edd", "vdm", "eagle", "medusa", "causal_lm"))
# What two tokenizers rarely read alike: digits, an accent, a symbol, white space.
TOKENIZER_PROBE = "In 2024, naïve 3.14 → f(x):\n\treturn"
SUPPORTED_TARGETS = ("llama", "mistral", "qwen2", "qwen3")


# Which target states a kind reads: chosen blocks (EDD), the last hidden state, or none.
READS_LAST = ("eagle", "medusa")
READS_NONE = ("vdm", "causal_lm")
ONE_LAYER = ("vdm", "eagle", "medusa")
LAYERED = ("edd", "vdm", "eagle")


@dataclass
class DrafterConfig:
    """What is chosen about a drafter.

    Attributes:
        kind: "edd"; "vdm", the vanilla draft model (EDD's layer without target states); "eagle" (the
            target's last hidden state and the next token's embedding, joined); "medusa" (heads on the last
            hidden state); "causal_lm" (any small Hugging Face LM of the target's vocabulary).
        tapped_blocks: target blocks whose outputs are EDD's soft prompts, from 0; negative counts from the
            end, and the number of blocks stands for the last hidden state, after the final norm. Several are
            joined by a trained projection. Other kinds read no blocks.
        layers: decoder layers of EDD; 1 is the paper's, and the other kinds have 1.
        draft_vocab_size: how many of the target's tokens can be drafted: the most frequent trained tokens of
            the corpus. null: all.
        anchor: EDD that joins each token with the newest verified state (ours).
        kv_heads: heads of keys and values of EDD, VDM and EAGLE. null: as many as the target has. EDD reads
            states through nothing else, and where the target shares them among queries (GQA) most of a state
            is lost: the EDD paper's targets share none.
        init: "random", or the number of the target block that the layers start from (negative from the end).
        train_embeddings: train the token embeddings instead of reading the target's.
        train_head: train the LM head, which starts from the target's.
        heads: MEDUSA's heads, one for each draft token.
        noise: EAGLE's noise, uniform within this distance, on the states it is trained with.
        input_norms: EAGLE with RMS norms on embedding, state and output, as in an MTP layer (C2T, Appendix
            F).
        model: folder or Hub id of the small LM ("causal_lm").
        lora_rank: train low-rank adapters of this rank in place of the small LM's weights; they are merged at
            the end. null: train the weights.
    """

    kind: Literal["edd", "vdm", "eagle", "medusa", "causal_lm"] = "edd"
    tapped_blocks: list[int] = field(default_factory=lambda: [-4])
    layers: int = 1
    anchor: bool = False
    kv_heads: int | None = None
    draft_vocab_size: int | None = 8192
    init: str | int = "random"
    train_embeddings: bool = False
    train_head: bool = True
    heads: int = 5
    noise: float = 0.1
    input_norms: bool = False
    model: str | None = None
    lora_rank: int | None = None

    def check(self) -> None:
        """Refuses what no drafter can be, whatever the target.

        Raises:
            UserError: the key and its remedy.
        """
        kind = self.kind
        if self.layers < 1:
            raise UserError(f"drafter.layers is {self.layers}: a drafter has at least 1")
        if self.layers > 1 and kind in ONE_LAYER:
            raise UserError(f"drafter.layers is {self.layers}, and {kind} has 1: leave it out")
        if kind == "edd" and not self.tapped_blocks:
            raise UserError("drafter.tapped_blocks is empty: name a block, such as [-4]")
        if self.kv_heads is not None and kind not in LAYERED:
            raise UserError(f"drafter.kv_heads is for {', '.join(LAYERED)}, and this is {kind}: leave it out")
        if self.kv_heads is not None and self.kv_heads < 1:
            raise UserError(
                f"drafter.kv_heads is {self.kv_heads}: name one above 0, or null for the target's number"
            )
        if self.kv_heads is not None and self.init != "random":
            raise UserError(
                "drafter.kv_heads: a layer that starts from a target block (init) has that block's heads; "
                "leave out one of the two"
            )
        if self.heads < 1:
            raise UserError(f"drafter.heads is {self.heads}: MEDUSA has at least 1")
        if not self.noise >= 0:  # NaN fails too
            raise UserError(f"drafter.noise is {self.noise}: it must be 0 or more")
        if self.lora_rank is not None and self.lora_rank < 1:
            raise UserError(f"drafter.lora_rank is {self.lora_rank}: name one above 0, or null for none")
        if kind == "medusa" and not self.train_head:
            raise UserError("drafter.train_head is false, and MEDUSA's heads are all it has: leave it out")
        if (kind == "causal_lm") != (self.model is not None):
            raise UserError(
                "drafter.model names the small LM of kind causal_lm, and of no other: "
                + ("name a folder or Hub id" if kind == "causal_lm" else "leave it out")
            )
        foreign = {"anchor": "edd", "input_norms": "eagle", "lora_rank": "causal_lm"}
        for key, owner in foreign.items():
            if getattr(self, key) and kind != owner:
                raise UserError(f"drafter.{key} is for kind {owner}, and this is {kind}: leave it out")
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
                f"{target.name} is a {target.config.model_type} model; {self.kind} drafters are for "
                f"{', '.join(SUPPORTED_TARGETS)}: choose such a target"
            )
        self.check()
        n = target.n_blocks
        tapped = self.tapped_blocks if self.kind == "edd" else []
        init = [self.init] if self.kind in LAYERED else []
        for key, blocks in (("tapped_blocks", tapped), ("init", init)):
            for block in blocks:
                is_last_state = key == "tapped_blocks" and block == n
                if block != "random" and not -n <= block < n and not is_last_state:
                    raise UserError(f"drafter.{key}: {target.name} has blocks {-n} to {n - 1}, not {block}")
        heads = target.config.num_attention_heads
        if self.kv_heads is not None and heads % self.kv_heads:
            divisors = ", ".join(str(n) for n in range(1, heads + 1) if not heads % n)
            raise UserError(
                f"drafter.kv_heads is {self.kv_heads}: {target.name} has {heads} heads, so name one of "
                f"{divisors}"
            )

    def read_blocks(self, n_blocks: int) -> list[int]:
        """Blocks of a target of so many whose outputs this kind reads; `n_blocks` stands for the last hidden
        state, after the final norm."""
        if self.kind in READS_NONE:
            return []
        if self.kind in READS_LAST:
            return [n_blocks]
        return [block_number(block, n_blocks) for block in self.tapped_blocks]


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
        drafter.check_target(target)
        config, attention = target.config, target.blocks[0].self_attn
        return cls(
            target=identity(target),
            tapped_blocks=drafter.read_blocks(target.n_blocks),
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


def read_config(folder: str | os.PathLike) -> dict[str, Any]:
    """The `config.json` of a drafter's folder.

    Raises:
        UserError: there is none, or it is not that of a drafter of this format.
    """
    config = read_json(Path(folder) / "config.json")
    kind = config.get("model_type") if isinstance(config, dict) else "broken"
    if kind not in MODEL_TYPES:
        raise UserError(f"{folder}: holds a {kind} model; give the folder of a drafter or of its bundle")
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
