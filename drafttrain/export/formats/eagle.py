"""EAGLE-1's layout, which its authors' code and vLLM (`method: eagle`) read. EAGLE-2 has the same weights.

The layout has no head: the target's is used, so a drafter that trained its own cannot be expressed. It has no
norms but the one before the MLP either.
"""

from drafttrain.export.formats.layout import (
    IDS,
    OWN,
    Config,
    Layout,
    Shapes,
    TargetParts,
    Tensors,
    check_own,
    config_problems,
    decoder_shapes,
    dtype_name,
    dtype_of,
    dtype_problems,
    foreign_name,
    layer_config,
    own_name,
    pack_own,
    rope_problems,
    size_problems,
    special_tokens,
    tensor_problems,
    unpack_own,
    without_ids,
)
from drafttrain.utils.errors import UserError

REQUIRED = {
    "architectures": list,
    "model_type": str,
    "num_hidden_layers": int,
    "hidden_size": int,
    "intermediate_size": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "vocab_size": int,
    "rms_norm_eps": float,
    "rope_theta": float,
    "bias": bool,  # of fc
}
OPTIONAL = {
    "head_dim": int,
    "hidden_act": str,
    "max_position_embeddings": int,
    "rope_parameters": dict,
    "rope_scaling": dict,
    "qkv_bias": bool,
    "tie_word_embeddings": bool,
    "torch_dtype": str,
    "transformers_version": str,
    "use_cache": bool,
    "initializer_range": float,
    "pretraining_tp": int,
    "bos_token_id": int,
    "eos_token_id": (int, list),
    "pad_token_id": int,
    OWN: dict,
}
AUTHORS = {"rope_theta": 10000.0, "bias": True}  # what their code takes where their own folders are silent


def own_shapes(config: Config) -> Shapes:
    """Shapes of an EAGLE drafter's own tensors, less `draft_to_target`."""
    hidden = config["hidden_size"]
    shapes = {"fc.weight": (hidden, 2 * hidden), **decoder_shapes(config, first_input_norm=False)}
    if config["train_embeddings"]:
        shapes["embed_tokens.weight"] = (config["target_vocab_size"], hidden)
    return shapes


def check_eagle(config: Config) -> None:
    """Refuses a drafter that EAGLE-1 cannot express.

    Raises:
        UserError: why, and what to do.
    """
    if config.get("input_norms"):
        raise UserError("EAGLE-1 has no norms on what fc reads; train with drafter.input_norms: false")
    if config["train_head"]:
        raise UserError(
            "EAGLE-1 has no head of its own, and this drafter has: train with drafter.train_head: false"
        )
    extra = [key for key in ("qk_norm", "output_bias", "mlp_bias") if config[key]]
    if extra or config["layers"] != 1:
        what = f"{config['layers']} layers" if not extra else " and ".join(extra)
        raise UserError(f"EAGLE-1 is one Llama layer and cannot express {what} of {config['target']['name']}")


def to_eagle(config: Config, tensors: Tensors, target: TargetParts) -> Layout:
    """An EAGLE drafter in EAGLE-1's layout.

    Raises:
        UserError: EAGLE-1 cannot express it.
    """
    check_eagle(config)
    ids = check_own(config, tensors, own_shapes(config), target)
    dtype = dtype_of(tensors)
    found = {
        "embed_tokens.weight": target.embeddings.to(dtype),
        **{foreign_name(name): tensor for name, tensor in without_ids(tensors).items()},
    }
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **layer_config(config),
        "bias": False,
        **({"qkv_bias": True} if config["attention_bias"] else {}),
        **special_tokens(target.config),
        "tie_word_embeddings": False,
        "torch_dtype": dtype_name(dtype),
        OWN: pack_own(config, ids),
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
    return Layout(fields, found, tuple(notes))


def from_eagle(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """The inverse of `to_eagle`: a drafter's own config and tensors.

    Raises:
        UserError: it was not exported from here.
    """
    own, ids = unpack_own(config)
    found = {own_name(name): tensor for name, tensor in tensors.items()}
    if not own["train_embeddings"]:
        del found["embed_tokens.weight"]
    return own, {**found, IDS: ids}


def eagle_problems(config: Config, tensors: Tensors) -> list[str]:
    """What is wrong with a folder in EAGLE-1's layout, whoever wrote it; nothing if it is right."""
    if OWN not in config:
        config = _with_defaults(config)
    problems = config_problems(config, REQUIRED, OPTIONAL) + rope_problems(config)
    problems = problems or size_problems(config)
    if problems:
        return problems
    if config["model_type"] != "llama" or config["architectures"] != ["LlamaForCausalLM"]:
        problems.append("config.json: model_type and architectures are not llama and [LlamaForCausalLM]")
    if config["num_hidden_layers"] != 1:
        problems.append(f"config.json: num_hidden_layers is {config['num_hidden_layers']}, not 1")
    if OWN in config:  # others' files are converted, and their configs stay as they were
        problems += dtype_problems(config, tensors, "torch_dtype")
    hidden = config["hidden_size"]
    layer = {
        **config,
        "layers": 1,
        "head_dim": config.get("head_dim", hidden // config["num_attention_heads"]),
        "attention_bias": config.get("qkv_bias", False),
        "output_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
    }
    shapes = {
        "embed_tokens.weight": (config["vocab_size"], hidden),
        "fc.weight": (hidden, 2 * hidden),
        **({"fc.bias": (hidden,)} if config["bias"] else {}),
        **{foreign_name(n): s for n, s in decoder_shapes(layer, first_input_norm=False).items()},
    }
    return problems + tensor_problems(tensors, shapes)


def _with_defaults(config: Config) -> Config:
    """A config of the authors' with what their code takes for the fields that it lacks."""
    found = {key: value for key, value in config.items() if (key, value) != ("rope_scaling", None)}
    if "num_attention_heads" in found:
        found.setdefault("num_key_value_heads", found["num_attention_heads"])
    return {**AUTHORS, **found}
