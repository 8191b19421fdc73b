"""MEDUSA-1 as vLLM reads it (`method: medusa`).

vLLM describes a `token_map` for heads over fewer tokens, but version 0.32 cannot load one with separate heads
(each is created for all of the target's tokens, and D rows do not fit), so the heads are written over all
tokens.
"""

from drafttrain.export.formats import layout
from drafttrain.export.formats.layout import IDS, OWN, Config, Layout, Shapes, Tensors
from drafttrain.kernels.machine import dtype_name
from drafttrain.target_lm.model import FrozenTarget

NAME, KINDS, SERVE = "MEDUSA heads for vLLM", ("medusa",), "medusa"
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
check = layout.check_own_config


def to_layout(config: Config, tensors: Tensors, target: FrozenTarget) -> Layout:
    """Return MEDUSA heads in vLLM's layout, over all of the target's tokens (`full_head`).

    Raises:
        UserError: they are not whole.
    """
    ids, size = layout.check_drafter(config, tensors), config["target_vocab_size"]
    exported: Tensors = {}
    for i in range(config["heads"]):
        exported[f"blocks.{i}.layers.0.weight"] = tensors[f"blocks.{i}.weight"]
        exported[f"blocks.{i}.layers.0.bias"] = tensors[f"blocks.{i}.bias"]
        exported[f"lm_heads.{i}.weight"] = layout.full_head(tensors[f"lm_heads.{i}.weight"], ids, size)
    fields = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config["hidden_size"],
        "vocab_size": size,
        "truncated_vocab_size": size,
        "num_heads": config["heads"],
        "num_hidden_layers": 1,  # residual blocks of each head
        "medusa_fc_bias": True,
        "original_lm_head": False,
        "dtype": dtype_name(layout.dtype_of(tensors)),
        OWN: layout.pack_own(config, ids),
    }
    notes = ()
    if len(ids) < size:
        n_bytes = sum(tensor.nbytes for tensor in exported.values())
        notes = (
            f"drafts the same {len(ids)} tokens as here; its heads have rows for all {size} tokens, "
            f"{n_bytes / 1e9:.2f} GB",
        )
    return Layout(fields, exported, notes)


def from_layout(config: Config, tensors: Tensors) -> tuple[Config, Tensors]:
    """Return the inverse of `to_layout`: a drafter's own config and tensors.

    Raises:
        UserError: it was not exported from here.
    """
    own, ids = layout.unpack_own(config)
    restored = {IDS: ids}
    for name, tensor in tensors.items():
        part, i, *rest = name.split(".")
        restored[f"{part}.{i}.{rest[-1]}"] = tensor[ids] if part == "lm_heads" else tensor
    return own, restored


def problems(config: Config, tensors: Tensors) -> list[str]:
    """Return the problems of a folder of MEDUSA heads for vLLM."""
    faults = layout.config_problems(config, REQUIRED, OPTIONAL)
    if faults:
        return faults
    if config["model_type"] != "medusa" or config["architectures"] != ["MedusaModel"]:
        faults.append("config.json: model_type and architectures are not medusa and [MedusaModel]")
    if config["original_lm_head"] or config["truncated_vocab_size"] != config["vocab_size"]:
        faults.append(
            "config.json: original_lm_head must be false and truncated_vocab_size equal to vocab_size, or "
            "vLLM cannot load separate heads"
        )
    for key in ("dtype", "torch_dtype"):
        faults += layout.dtype_problems(config, tensors, key)
    return faults + layout.tensor_problems(tensors, _shapes(config))


def _shapes(config: Config) -> Shapes:
    """Return the shapes of all tensors."""
    hidden, shapes = config["hidden_size"], {}
    for i in range(config["num_heads"]):
        for j in range(config["num_hidden_layers"]):
            shapes[f"blocks.{i}.layers.{j}.weight"] = (hidden, hidden)
            if config["medusa_fc_bias"]:
                shapes[f"blocks.{i}.layers.{j}.bias"] = (hidden,)
        shapes[f"lm_heads.{i}.weight"] = (config["vocab_size"], hidden)
    return shapes
