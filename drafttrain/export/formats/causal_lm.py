"""Drafters that read tokens only, as plain causal LMs: `AutoModelForCausalLM` loads them, transformers takes
them as `assistant_model`, vLLM as `method: draft_model`.

A vanilla draft model (VDM) becomes a Llama or Qwen of one layer; a small LM is written as it was loaded.
"""

import copy

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from drafttrain.export.formats import layout
from drafttrain.export.formats.layout import IDS, LAYERS, OWN, SPECIAL, Config, Layout, Shapes, Tensors
from drafttrain.kernels.machine import dtype_name
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError, brief

NAME, KINDS, SERVE = "a causal LM of a known kind", ("vdm", "causal_lm"), "draft_model"
REQUIRED = {
    **LAYERS,
    "head_dim": int,
    "hidden_act": str,
    "max_position_embeddings": int,
    "rope_parameters": dict,
    "tie_word_embeddings": bool,
    "dtype": str,
}
OPTIONAL = {**SPECIAL, "attention_bias": bool, "mlp_bias": bool, "use_sliding_window": bool}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
HEAD = "lm_head.weight"
SMALL_LM = "drafttrain_causal_lm"


def check(config: Config) -> None:
    """Check that a drafter can be a causal LM.

    Raises:
        UserError: no model type has such layers, or keys are missing.
    """
    layout.check_own_config(config)
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


def to_layout(config: Config, tensors: Tensors, target: FrozenTarget) -> Layout:
    """Return a VDM as a causal LM over all of the target's tokens with the same greedy drafts (`full_head`),
    or a small LM unchanged.

    Raises:
        UserError: the drafter is not whole.
    """
    if config["model_type"] == SMALL_LM:
        return _small_lm(config, tensors, target)
    ids, kind = layout.check_drafter(config, tensors), architecture(config)
    dtype, size = layout.dtype_of(tensors), config["target_vocab_size"]
    embeddings, head = layout.embeddings(target), target.lm_head.weight.detach()  # [V, H] each
    inner = {name: tensor for name, tensor in layout.without_ids(tensors).items() if name != HEAD}
    inner = {"embed_tokens.weight": embeddings.to(dtype), **inner}
    exported = {f"model.{layout.foreign_name(name)}": tensor for name, tensor in inner.items()}
    whole, trained = len(ids) == size, config["train_embeddings"] or config["train_head"]
    tied = whole and not trained and torch.equal(embeddings, head)
    if not tied:
        rows = tensors[HEAD] if HEAD in tensors else head[ids.to(head.device)].to(dtype)
        exported[HEAD] = layout.full_head(rows, ids, size)
    fields = {
        "architectures": [ARCHITECTURES[kind["model_type"]]],
        **kind,
        **layout.layer_config(config),
        **layout.special_tokens(target.config),
        "tie_word_embeddings": tied,
        "dtype": dtype_name(dtype),
        OWN: layout.pack_own(config, ids),
    }
    notes = ()
    if not whole:
        notes = (
            f"drafts the same {len(ids)} tokens as here: the logits of the other {size - len(ids)} are never "
            "the highest",
        )
    return Layout(fields, exported, notes, target.tokenizer)


def from_layout(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Return the inverse of `to_layout`: a drafter's own config and tensors.

    Raises:
        UserError: it was not exported from here.
    """
    own, ids = layout.unpack_own(config)
    if own["model_type"] == SMALL_LM:
        return own, {**{f"lm.{name}": tensor for name, tensor in tensors.items()}, IDS: ids}
    restored = {layout.own_name(name.removeprefix("model.")): tensor for name, tensor in tensors.items()}
    head = restored.pop(HEAD, None)
    if own["train_head"]:
        restored[HEAD] = head[ids]
    if not own["train_embeddings"]:
        del restored["embed_tokens.weight"]
    return own, {**restored, IDS: ids}


def problems(config: Config, tensors: Tensors) -> list[str]:
    """Return the problems of a causal LM: its tensors have to be those that transformers makes of its config.
    A VDM is of one of a few model types, with known fields; a small LM may be of any type."""
    own, rope, faults = config.get(OWN), config.get("rope_parameters") or {}, []
    is_small = isinstance(own, dict) and own.get("model_type") == SMALL_LM
    if not is_small:
        faults = layout.config_problems(config, REQUIRED, OPTIONAL)
        if config.get("model_type") not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            faults.append(f"config.json: model_type is {config.get('model_type')}, none of {known}")
        faults = faults or layout.size_problems(config)
    if faults:
        return faults
    try:
        model = _model(config)
    except Exception as error:  # each config class has checks of its own
        return [f"config.json: transformers makes no causal LM of it ({brief(error)})"]
    if config.get("architectures") != [type(model).__name__]:
        faults.append(f"config.json: architectures is not [{type(model).__name__}]")
    if not is_small or "rope_theta" in rope:  # a small LM may have none, or several by layer
        faults += layout.rope_problems(config)
    faults += layout.dtype_problems(config, tensors, "dtype")
    return faults + layout.tensor_problems(tensors, *_shapes(model))


def _small_lm(config: Config, tensors: Tensors, target: FrozenTarget) -> Layout:
    """Return a small LM in its own layout, with the trained weights."""
    ids, inner = layout.check_drafter(config, tensors), layout.without_ids(tensors)
    # null fields are left out unless their default is another value, as that of Mistral's window
    defaults = AutoConfig.for_model(config["lm"]["model_type"])
    fields = {
        key: value
        for key, value in config["lm"].items()
        if value is not None or getattr(defaults, key, None) is not None
    }
    fields["architectures"] = [type(_model(fields)).__name__]
    rope = fields.get("rope_parameters", {})
    if "rope_theta" in rope:  # else there are none, or several by layer
        fields |= layout.rope_fields(rope)
    fields |= {"dtype": dtype_name(layout.dtype_of(tensors)), OWN: layout.pack_own(config, ids)}
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
    exported = {name.removeprefix("lm."): tensor for name, tensor in inner.items()}
    return Layout(fields, exported, tuple(notes), target.tokenizer)


def _model(config: Config) -> PreTrainedModel:
    """Return the model that transformers makes of a `config.json`, on the meta device."""
    fields = {key: value for key, value in copy.deepcopy(config).items() if key != OWN}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))


def _shapes(model: PreTrainedModel) -> tuple[Shapes, Shapes]:
    """Return the shapes of a model's tensors, and of those that may be missing because they are tied to
    others."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    tied = {name: shapes.pop(name) for name in model.all_tied_weights_keys}
    return shapes, tied
