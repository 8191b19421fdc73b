"""A drafter that reads tokens alone as a plain causal LM: `AutoModelForCausalLM` loads it, transformers takes
it as `assistant_model`, vLLM as `method: draft_model`.

A vanilla draft model (VDM) becomes a Llama or Qwen of one layer; a small LM becomes itself again.
"""

import copy
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from drafttrain.export.formats.layout import (
    IDS,
    OWN,
    Config,
    Layout,
    Shapes,
    TargetParts,
    Tensors,
    check_drafter,
    check_own,
    config_problems,
    decoder_shapes,
    dtype_name,
    dtype_of,
    dtype_problems,
    foreign_name,
    full_head,
    layer_config,
    own_name,
    pack_own,
    rope_fields,
    rope_problems,
    size_problems,
    special_tokens,
    tensor_problems,
    unpack_own,
    without_ids,
)
from drafttrain.utils.errors import UserError, brief

REQUIRED = {
    "architectures": list,
    "model_type": str,
    "num_hidden_layers": int,
    "hidden_size": int,
    "intermediate_size": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "head_dim": int,
    "hidden_act": str,
    "max_position_embeddings": int,
    "vocab_size": int,
    "rms_norm_eps": float,
    "rope_theta": float,
    "rope_parameters": dict,
    "tie_word_embeddings": bool,
    "dtype": str,
}
OPTIONAL = {
    "attention_bias": bool,
    "mlp_bias": bool,
    "use_sliding_window": bool,
    "rope_scaling": dict,
    "bos_token_id": int,
    "eos_token_id": (int, list),
    "pad_token_id": int,
    OWN: dict,
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
HEAD = "lm_head.weight"
SMALL_LM = "drafttrain_causal_lm"


def own_shapes(config: Config) -> Shapes | None:
    """Shapes of a VDM's own tensors, less `draft_to_target`; None for a small LM, which can be any."""
    if config["model_type"] == SMALL_LM:
        return None
    hidden = config["hidden_size"]
    shapes = {**decoder_shapes(config), "norm.weight": (hidden,)}
    if config["train_embeddings"]:
        shapes["embed_tokens.weight"] = (config["target_vocab_size"], hidden)
    if config["train_head"]:
        shapes[HEAD] = (config["draft_vocab_size"], hidden)
    return shapes


def check_causal_lm(config: Config) -> None:
    """Refuses a drafter that is no causal LM.

    Raises:
        UserError: no model type has such layers.
    """
    if config["model_type"] != SMALL_LM:
        architecture(config)


def architecture(config: Config) -> Config:
    """The model type whose layers have these biases and norms, and the fields that say so.

    Raises:
        UserError: there is none.
    """
    query, output, mlp = config["attention_bias"], config["output_bias"], config["mlp_bias"]
    if config["qk_norm"] and query == output and not mlp:
        return {"model_type": "qwen3", "attention_bias": query, "use_sliding_window": False}
    if not config["qk_norm"] and query == output:
        return {"model_type": "llama", "attention_bias": query, "mlp_bias": mlp}
    if not config["qk_norm"] and query and not mlp:
        return {"model_type": "qwen2", "use_sliding_window": False}
    raise UserError(f"no Llama, Qwen2 or Qwen3 model has the biases and norms of {config['target']['name']}")


def to_causal_lm(config: Config, tensors: Tensors, target: TargetParts) -> Layout:
    """A VDM as a causal LM over all of the target's tokens, which drafts what the VDM drafts (`full_head`),
    or a small LM as it is.

    Raises:
        UserError: no model type has such layers, or the drafter is not whole.
    """
    if config["model_type"] == SMALL_LM:
        return _small_lm(config, tensors)
    ids = check_own(config, tensors, own_shapes(config), target)
    dtype, size = dtype_of(tensors), config["target_vocab_size"]
    whole = len(ids) == size
    inner = {name: tensor for name, tensor in without_ids(tensors).items() if name != HEAD}
    inner = {"embed_tokens.weight": target.embeddings.to(dtype), **inner}
    found = {f"model.{foreign_name(name)}": tensor for name, tensor in inner.items()}
    tied = whole and target.is_tied and not (config["train_embeddings"] or config["train_head"])
    if not tied:
        rows = tensors[HEAD] if HEAD in tensors else target.head[ids.to(target.head.device)].to(dtype)
        found[HEAD] = full_head(rows, ids, size)
    kind = architecture(config)
    fields = {
        "architectures": [ARCHITECTURES[kind["model_type"]]],
        **kind,
        **layer_config(config),
        **special_tokens(target.config),
        "tie_word_embeddings": tied,
        "dtype": dtype_name(dtype),
        OWN: pack_own(config, ids),
    }
    notes = ()
    if not whole:
        notes = (
            f"drafts the same {len(ids)} tokens as here: the other {size - len(ids)} have a logit that is "
            "never the highest",
        )
    return Layout(fields, found, notes)


def from_causal_lm(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """The inverse of `to_causal_lm`: a drafter's own config and tensors.

    Raises:
        UserError: it was not exported from here.
    """
    own, ids = unpack_own(config)
    if own["model_type"] == SMALL_LM:
        return own, {**{f"lm.{name}": tensor for name, tensor in tensors.items()}, IDS: ids}
    found = {own_name(name.removeprefix("model.")): tensor for name, tensor in tensors.items()}
    head = found.pop(HEAD, None)
    if own["train_head"]:
        found[HEAD] = head[ids]
    if not own["train_embeddings"]:
        del found["embed_tokens.weight"]
    return own, {**found, IDS: ids}


def causal_lm_problems(config: Config, tensors: Tensors) -> list[str]:
    """What is wrong with a causal LM of a kind that is exported here; nothing if it is right. A small LM,
    which can be any, is compared with what transformers makes of its config."""
    own = config.get(OWN)
    if isinstance(own, dict) and own.get("model_type") == SMALL_LM:
        return _small_lm_problems(config, tensors)
    problems = config_problems(config, REQUIRED, OPTIONAL) + rope_problems(config)
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        problems.append(f"config.json: model_type is {kind}, none of {', '.join(ARCHITECTURES)}")
    elif config.get("architectures") != [ARCHITECTURES[kind]]:
        problems.append(f"config.json: architectures is not [{ARCHITECTURES[kind]}]")
    problems = problems or size_problems(config)
    if problems:
        return problems
    hidden, size = config["hidden_size"], config["vocab_size"]
    has_bias = config.get("attention_bias", False)
    layers: dict[str, Any] = {
        **config,
        "layers": config["num_hidden_layers"],
        "attention_bias": has_bias or kind == "qwen2",
        "output_bias": has_bias,
        "mlp_bias": config.get("mlp_bias", False),
        "qk_norm": kind == "qwen3",
    }
    shapes = {
        "embed_tokens.weight": (size, hidden),
        **{foreign_name(name): shape for name, shape in decoder_shapes(layers).items()},
        "norm.weight": (hidden,),
    }
    wanted = {f"model.{name}": shape for name, shape in shapes.items()}
    if not config["tie_word_embeddings"]:
        wanted[HEAD] = (size, hidden)
    return dtype_problems(config, tensors, "dtype") + tensor_problems(tensors, wanted)


def _small_lm(config: Config, tensors: Tensors) -> Layout:
    """A small LM as it was, with what has been trained."""
    ids, inner = check_drafter(config, tensors, None), without_ids(tensors)
    fields = {key: value for key, value in config["lm"].items() if value is not None}
    rope = fields.get("rope_parameters", {})
    if "rope_theta" in rope:  # else there are none, or several by layer
        fields |= rope_fields(rope)
    fields |= {"dtype": dtype_name(dtype_of(tensors)), OWN: pack_own(config, ids)}
    notes, size, known = [], fields["vocab_size"], config["target_vocab_size"]
    if len(ids) < size:
        notes.append(
            f"a small LM's head stays whole: it drafts over {size} tokens, here over {len(ids)}",
        )
    if size != known:
        notes.append(
            f"it has {size} tokens and the target {known}: transformers wants `tokenizer` and "
            "`assistant_tokenizer` with it, and vLLM `use_heterogeneous_vocab`"
        )
    found = {name.removeprefix("lm."): tensor for name, tensor in inner.items()}
    return Layout(fields, found, tuple(notes))


def _small_lm_problems(config: Config, tensors: Tensors) -> list[str]:
    try:
        with torch.device("meta"):
            made = AutoConfig.for_model(**copy.deepcopy(config))  # it changes rope fields in place
            model = AutoModelForCausalLM.from_config(made)
    except Exception as error:  # each config class has checks of its own
        return [f"config.json: transformers makes no causal LM of it ({brief(error)})"]
    problems = dtype_problems(config, tensors, "dtype")
    if "rope_theta" in config.get("rope_parameters", {}):
        problems += rope_problems(config)
    if config.get("architectures") != [type(model).__name__]:
        problems.append(f"config.json: architectures is not [{type(model).__name__}]")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = {name: shapes[name] for name in model.all_tied_weights_keys}
    return problems + tensor_problems(tensors, {n: s for n, s in shapes.items() if n not in tied}, tied)
