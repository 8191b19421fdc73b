"""EAGLE-1's layout, which its authors' code and vLLM (`method: eagle`) read. EAGLE-2 has the same weights.

The layout has no head: the target's is used, so a drafter with a trained head cannot be expressed. Its only
norm is the one before the MLP.
"""

from drafttrain.export.formats import layout
from drafttrain.export.formats.layout import IDS, LAYERS, OWN, SIZES, SPECIAL, Config, Layout, Tensors
from drafttrain.kernels.machine import dtype_name
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError

NAME, KINDS, SERVE = "in EAGLE-1's layout", ("eagle",), "eagle"
REQUIRED = {**LAYERS, "bias": bool}  # of fc
OPTIONAL = {
    **SPECIAL,
    "head_dim": int,
    "hidden_act": str,
    "max_position_embeddings": int,
    "rope_parameters": dict,
    "qkv_bias": bool,
    "tie_word_embeddings": bool,
    "torch_dtype": str,
    "transformers_version": str,
    "use_cache": bool,
    "initializer_range": float,
    "pretraining_tp": int,
}
AUTHORS = {"rope_theta": 10000.0, "bias": True}  # defaults of the authors' code


def check(config: Config) -> None:
    """Check that EAGLE-1 can express a drafter.

    Raises:
        UserError: it cannot, or keys are missing.
    """
    layout.check_own_config(config)
    for key in ("input_norms", "train_head"):
        if config.get(key):
            raise UserError(f"drafter.{key}: must be false for EAGLE-1, got true; train again")
    extra = [key for key in ("qk_norm", "output_bias", "mlp_bias") if config[key]]
    if extra or config["layers"] != 1:
        what = " and ".join(extra) or f"{config['layers']} layers"
        raise UserError(
            f"drafter: must be one plain Llama layer for EAGLE-1, got {what}; train again with "
            "drafter.layers: 1 and drafter.init: random"
        )


def to_layout(config: Config, tensors: Tensors, target: FrozenTarget) -> Layout:
    """Return an EAGLE drafter in EAGLE-1's layout.

    Raises:
        UserError: it is not whole.
    """
    ids = layout.check_drafter(config, tensors)
    dtype = layout.dtype_of(tensors)
    exported = {
        "embed_tokens.weight": layout.embeddings(target).to(dtype),
        **{layout.foreign_name(name): tensor for name, tensor in layout.without_ids(tensors).items()},
    }
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **layout.layer_config(config),
        "bias": False,
        **({"qkv_bias": True} if config["attention_bias"] else {}),
        **layout.special_tokens(target.config),
        "tie_word_embeddings": False,
        "torch_dtype": dtype_name(dtype),
        OWN: layout.pack_own(config, ids),
    }
    notes = []
    if len(ids) < config["target_vocab_size"]:
        notes.append(
            f"EAGLE-1 reads the target's whole head: served, it drafts over {config['target_vocab_size']} "
            f"tokens, here over {len(ids)}; acceptance may differ"
        )
    rope, width = config["rope_parameters"].get("rope_type", "default"), config["head_dim"]
    if rope != "default" or width * config["num_attention_heads"] != config["hidden_size"]:
        what = f"rope scaling of type {rope}" if rope != "default" else f"heads of {width}"
        notes.append(f"vLLM reads it; EAGLE's own code cannot express {what}")
    return Layout(fields, exported, tuple(notes))


def from_layout(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Return the inverse of `to_layout`: a drafter's own config and tensors.

    Raises:
        UserError: it was not exported from here.
    """
    own, ids = layout.unpack_own(config)
    restored = {layout.own_name(name): tensor for name, tensor in tensors.items()}
    if not own["train_embeddings"]:
        del restored["embed_tokens.weight"]
    return own, {**restored, IDS: ids}


def problems(config: Config, tensors: Tensors) -> list[str]:
    """Return the problems of a folder in EAGLE-1's layout, exported by us or by others."""
    if OWN not in config:
        config = _with_defaults(config)
    faults = layout.config_problems(config, REQUIRED, OPTIONAL) + layout.rope_problems(config)
    faults = faults or layout.size_problems(config)
    if faults:
        return faults
    if config["model_type"] != "llama" or config["architectures"] != ["LlamaForCausalLM"]:
        faults.append("config.json: model_type and architectures are not llama and [LlamaForCausalLM]")
    if config["num_hidden_layers"] != 1:
        faults.append(f"config.json: num_hidden_layers is {config['num_hidden_layers']}, not 1")
    if OWN in config:  # others convert their files without changing their configs
        faults += layout.dtype_problems(config, tensors, "torch_dtype")
    own = {name: config[name] for name in SIZES if name in config} | {"model_type": "drafttrain_eagle"}
    own |= {"attention_bias": config.get("qkv_bias", False), "train_head": False, "train_embeddings": True}
    own["target_vocab_size"] = config["vocab_size"]
    shapes = {layout.foreign_name(name): shape for name, shape in layout.own_shapes(own)[0].items()}
    if config["bias"]:
        shapes["fc.bias"] = (config["hidden_size"],)
    return faults + layout.tensor_problems(tensors, shapes)


def _with_defaults(config: Config) -> Config:
    """Add the defaults of the authors' code to a config of theirs."""
    filled = {key: value for key, value in config.items() if (key, value) != ("rope_scaling", None)}
    if "num_attention_heads" in filled:
        filled.setdefault("num_key_value_heads", filled["num_attention_heads"])
    return {**AUTHORS, **filled}
