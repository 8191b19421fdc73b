"""MEDUSA-1 as vLLM reads it (`method: medusa`).

vLLM describes a `token_map` for heads over fewer tokens, but version 0.32 cannot load one with separate heads
(each is created for all of the target's tokens, and D rows do not fit), so the heads are written over all
tokens.
"""

import torch

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
    dtype_name,
    dtype_of,
    dtype_problems,
    full_head,
    pack_own,
    tensor_problems,
    unpack_own,
)

REQUIRED = {
    "architectures": list,
    "model_type": str,
    "hidden_size": int,
    "vocab_size": int,
    "truncated_vocab_size": int,
    "num_heads": int,
    "num_hidden_layers": int,
    "medusa_fc_bias": bool,
    "original_lm_head": bool,
}
OPTIONAL = {"dtype": str, "torch_dtype": str, "transformers_version": str, OWN: dict}


def to_medusa(config: Config, tensors: Tensors, target: TargetParts) -> Layout:
    """Return MEDUSA heads in vLLM's layout, over all of the target's tokens (`full_head`)."""
    ids, found = _heads(config, tensors, target)
    fields = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config["hidden_size"],
        "vocab_size": config["target_vocab_size"],
        "truncated_vocab_size": config["target_vocab_size"],
        "num_heads": config["heads"],
        "num_hidden_layers": 1,  # residual blocks of each head
        "medusa_fc_bias": True,
        "original_lm_head": False,
        "dtype": dtype_name(dtype_of(tensors)),
        OWN: pack_own(config, ids),
    }
    return Layout(fields, found, _notes(config, found, len(ids)))


def from_medusa(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Return the inverse of `to_medusa`: a drafter's own config and tensors.

    Raises:
        UserError: it was not exported from here.
    """
    own, ids = unpack_own(config)
    found = {IDS: ids}
    for name, tensor in tensors.items():
        part, i, *rest = name.split(".")
        found[f"{part}.{i}.{rest[-1]}"] = tensor[ids] if part == "lm_heads" else tensor
    return own, found


def medusa_problems(config: Config, tensors: Tensors) -> list[str]:
    """Return the problems of a folder of MEDUSA heads for vLLM."""
    problems = config_problems(config, REQUIRED, OPTIONAL)
    if problems:
        return problems
    if config["model_type"] != "medusa" or config["architectures"] != ["MedusaModel"]:
        problems.append("config.json: model_type and architectures are not medusa and [MedusaModel]")
    if config["original_lm_head"] or config["truncated_vocab_size"] != config["vocab_size"]:
        problems.append(
            "config.json: original_lm_head must be false and truncated_vocab_size equal to vocab_size, or "
            "vLLM cannot load separate heads"
        )
    problems += dtype_problems(config, tensors, "dtype") + dtype_problems(config, tensors, "torch_dtype")
    return problems + tensor_problems(tensors, _shapes(config, config["num_hidden_layers"]))


def _heads(config: Config, tensors: Tensors, target: TargetParts) -> tuple[torch.Tensor, Tensors]:
    """Return the draft vocabulary [D], and blocks and heads over all tokens under vLLM's names."""
    ids = check_own(config, tensors, target)
    found: Tensors = {}
    for i in range(config["heads"]):
        found[f"blocks.{i}.layers.0.weight"] = tensors[f"blocks.{i}.weight"]
        found[f"blocks.{i}.layers.0.bias"] = tensors[f"blocks.{i}.bias"]
        found[f"lm_heads.{i}.weight"] = full_head(
            tensors[f"lm_heads.{i}.weight"], ids, config["target_vocab_size"]
        )
    return ids, found


def _shapes(config: Config, blocks: int) -> Shapes:
    """Return the shapes of all tensors under vLLM's names."""
    hidden, shapes = config["hidden_size"], {}
    for i in range(config["num_heads"]):
        for j in range(blocks):
            shapes[f"blocks.{i}.layers.{j}.weight"] = (hidden, hidden)
            if config["medusa_fc_bias"]:
                shapes[f"blocks.{i}.layers.{j}.bias"] = (hidden,)
        shapes[f"lm_heads.{i}.weight"] = (config["vocab_size"], hidden)
    return shapes


def _notes(config: Config, found: Tensors, draft: int) -> tuple[str, ...]:
    size = config["target_vocab_size"]
    if draft == size:
        return ()
    n_bytes = sum(tensor.nbytes for tensor in found.values())
    return (
        f"drafts the same {draft} tokens as here; its heads have rows for all {size} tokens, "
        f"{n_bytes / 1e9:.2f} GB",
    )
