"""Drafters that read tokens only, as plain causal LMs: `AutoModelForCausalLM` loads them, transformers takes
them as `assistant_model`, vLLM as `method: draft_model`.

A vanilla draft model (VDM) becomes a Llama or Qwen of one layer; a small LM is written as it was loaded.
"""

import copy

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

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


def check_causal_lm(config: Config) -> None:
    """Check that a drafter can be a causal LM.

    Raises:
        UserError: no model type has such layers.
    """
    if config["model_type"] != SMALL_LM:
        architecture(config)


def architecture(config: Config) -> Config:
    """Return the model type whose layers have these biases and norms, and the fields for them.

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
    raise UserError(
        "target: must have the biases and norms of a Llama, Qwen2 or Qwen3 model for causal-lm, got "
        f"{config['target']['name']}"
    )


def to_causal_lm(config: Config, tensors: Tensors, target: TargetParts) -> Layout:
    """Return a VDM as a causal LM over all of the target's tokens with the same greedy drafts (`full_head`),
    or a small LM unchanged.

    Raises:
        UserError: no model type has such layers, or the drafter is not whole.
    """
    if config["model_type"] == SMALL_LM:
        return _small_lm(config, tensors)
    ids = check_own(config, tensors, target)
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
            f"drafts the same {len(ids)} tokens as here: the logits of the other {size - len(ids)} are never "
            "the highest",
        )
    return Layout(fields, found, notes)


def from_causal_lm(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Return the inverse of `to_causal_lm`: a drafter's own config and tensors.

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
    """Return the problems of a causal LM. A VDM is of a few kinds, with known fields; a small LM, of any
    kind, has to be what transformers makes of its config."""
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
    return dtype_problems(config, tensors, "dtype") + tensor_problems(tensors, *_shapes(_model(config)))


def _small_lm(config: Config, tensors: Tensors) -> Layout:
    """Return a small LM in its own layout, with the trained weights."""
    ids, inner = check_drafter(config, tensors), without_ids(tensors)
    fields = {key: value for key, value in config["lm"].items() if value is not None}
    rope = fields.get("rope_parameters", {})
    if "rope_theta" in rope:  # else there are none, or several by layer
        fields |= rope_fields(rope)
    fields |= {"dtype": dtype_name(dtype_of(tensors)), OWN: pack_own(config, ids)}
    notes, size, known = [], fields["vocab_size"], config["target_vocab_size"]
    if len(ids) < size:
        notes.append(
            f"a small LM keeps its whole head: it drafts over {size} tokens, here over {len(ids)}",
        )
    if size != known:
        notes.append(
            f"it has {size} tokens and the target {known}: transformers needs `tokenizer` and "
            "`assistant_tokenizer` with it, and vLLM `use_heterogeneous_vocab`"
        )
    found = {name.removeprefix("lm."): tensor for name, tensor in inner.items()}
    return Layout(fields, found, tuple(notes))


def _small_lm_problems(config: Config, tensors: Tensors) -> list[str]:
    try:
        model = _model(config)
    except Exception as error:  # each config class has checks of its own
        return [f"config.json: transformers makes no causal LM of it ({brief(error)})"]
    problems = dtype_problems(config, tensors, "dtype")
    if "rope_theta" in config.get("rope_parameters", {}):
        problems += rope_problems(config)
    if config.get("architectures") != [type(model).__name__]:
        problems.append(f"config.json: architectures is not [{type(model).__name__}]")
    return problems + tensor_problems(tensors, *_shapes(model))


def _model(config: Config) -> PreTrainedModel:
    """Return the model that transformers makes of a `config.json`, without values."""
    fields = {key: value for key, value in copy.deepcopy(config).items() if key != OWN}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))


def _shapes(model: PreTrainedModel) -> tuple[Shapes, Shapes]:
    """Return the shapes of a model's tensors, and of those that may be missing because they are tied to
    others."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = {name: shapes.pop(name) for name in model.all_tied_weights_keys}
    return shapes, tied
