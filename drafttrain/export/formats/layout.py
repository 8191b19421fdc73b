"""Read, write and check folders in the layouts of other tools; names, shapes and config fields of decoder
layers.

An exporter is a function from a drafter's config and tensors to those of the other layout, and its inverse.
"""

import copy
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from inspect import get_annotations
from pathlib import Path
from types import UnionType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from drafttrain.drafters import registration as _drafters  # noqa: F401 - so that `AutoModel` knows them
from drafttrain.drafters.config import kind_of
from drafttrain.drafters.model_config import DraftModelConfig
from drafttrain.drafters.weights import read_tensors as drafter_tensors
from drafttrain.kernels.machine import dtype_name
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.disk import require_free_disk
from drafttrain.utils.errors import UserError, brief
from drafttrain.utils.files import read_json, require_file
from drafttrain.utils.folders import new_folder
from drafttrain.utils.manifest import MANIFEST, is_ours, write_manifest

WEIGHTS = "model.safetensors"
OWN = "drafttrain"  # key of the drafter's own config in the other tool's, which makes the way back exact
IDS = "draft_to_target"
OF_KIND = {"medusa": ("heads",), "causal_lm": ("lm",)}  # keys of a drafter's own config that only they have
UNREAD = {"tapped_blocks", "training", "head_dtype", "layers_dtype"}  # keys of it that no layout depends on
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
MLP = ("gate_proj", "up_proj", "down_proj")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
SIZES = (  # of layers, all above 0
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]
Shapes = dict[str, tuple[int, ...]]
Keys = Mapping[str, type | UnionType]

# Keys of a `config.json` of decoder layers: those that every layout has, and those that any may have.
LAYERS: Keys = {
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
}
SPECIAL: Keys = {
    "rope_scaling": dict,
    "bos_token_id": int,
    "eos_token_id": int | list,
    "pad_token_id": int,
    OWN: dict,
}


@dataclass(frozen=True)
class Layout:
    """A drafter as another tool reads it: `config.json`, the tensors of one file, notes for the user, and the
    tokenizer where the layout includes one."""

    config: Config
    tensors: Tensors
    notes: tuple[str, ...] = ()
    tokenizer: PreTrainedTokenizerBase | None = None


# files


def read_tensors(path: Path) -> Tensors:
    """Read all tensors of a safetensors file.

    Raises:
        UserError: it is missing or damaged.
    """
    require_file(path)
    try:
        return drafter_tensors(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: cannot be read ({brief(error)}); make it again") from None


def check_place(folder: str | os.PathLike, replace: bool = True) -> None:
    """Refuse to replace anything but an earlier export of ours; in particular, never the exported drafter.

    Args:
        replace: False refuses to replace an export, too.

    Raises:
        UserError: the folder holds something else.
    """
    folder = Path(folder)
    if folder.exists() and folder.samefile(Path.cwd()):
        raise UserError(f"{folder}: must be a folder of its own, got the working directory; name another")
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not replace:
        raise UserError(f"{folder}: holds something already; name a new folder for the drafter with --out")
    is_listed = (folder / MANIFEST).is_file()  # False if an export was loaded, changed and saved again
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else None
    if not isinstance(config, dict) or OWN not in config or not (is_listed and is_ours(folder)):
        raise UserError(f"{folder}: holds something else than an export; name another folder with --out")


def write(folder: str | os.PathLike, layout: Layout, what: str = "the export") -> None:
    """Write a layout's folder, whole or not at all. An existing one is replaced: see `check_place`.

    Args:
        what: name for messages.

    Raises:
        UserError: the disk is full.
    """
    require_free_disk(folder, sum(tensor.nbytes for tensor in layout.tensors.values()), what)
    with new_folder(folder) as new:
        if layout.tokenizer is not None:
            layout.tokenizer.save_pretrained(new)
        stored = {name: tensor.contiguous() for name, tensor in layout.tensors.items()}
        save_file(stored, new / WEIGHTS, metadata={"format": "pt"})
        (new / WEIGHTS).chmod(0o644)  # safetensors lets nobody but the owner read
        (new / "config.json").write_text(json.dumps(layout.config, indent=2) + "\n", encoding="utf-8")
        write_manifest(new)


def read(folder: str | os.PathLike) -> tuple[Config, Tensors]:
    """Read config and tensors of a layout's folder.

    Raises:
        UserError: a file is missing or damaged.
    """
    config = read_json(Path(folder) / "config.json")
    if not isinstance(config, dict):
        raise UserError(f"{folder}/config.json: must be a JSON object; export it again")
    return config, read_tensors(Path(folder) / WEIGHTS)


# decoder layers


def foreign_name(name: str) -> str:
    """Return a tensor's name in transformers: layers.0.self_attn.q_proj.weight for layers.0.q_proj.weight.
    Names outside decoder layers do not change."""
    parts = name.split(".")
    if parts[0] != "layers":
        return name
    parent = "self_attn" if parts[2] in ATTENTION else "mlp" if parts[2] in MLP else None
    return ".".join([*parts[:2], *([parent] if parent else []), *parts[2:]])


def own_name(name: str) -> str:
    """Return the inverse of `foreign_name`."""
    return re.sub(r"^(layers\.\d+\.)(self_attn|mlp)\.", r"\1", name)


def own_shapes(config: Config) -> tuple[Shapes, Shapes]:
    """Return the shapes of a drafter's stored tensors without `IDS`, by our names, and of those that may be
    missing because they are tied to others.

    Args:
        config: the drafter's own.
    """
    with torch.device("meta"):
        model = AutoModel.from_config(AutoConfig.for_model(**copy.deepcopy(config)))  # it changes rope fields
    left_out = {IDS, *(model._keys_to_ignore_on_save or ())}
    shapes = {n: tuple(t.shape) for n, t in model.state_dict().items() if n not in left_out}
    return shapes, {name: shapes.pop(name) for name in _tied(model) if name in shapes}


def _tied(model: PreTrainedModel) -> list[str]:
    """Return the names of tensors that are tied to others, those of a model inside included."""
    inner = [(f"{name}.", part) for name, part in model.named_children() if isinstance(part, PreTrainedModel)]
    return [
        f"{prefix}{name}" for prefix, part in (("", model), *inner) for name in part.all_tied_weights_keys
    ]


def layer_config(config: Config) -> Config:
    """Return the fields of a Llama-like `config.json` that describe a drafter's layers."""
    return {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_hidden_layers": config["layers"],
        "num_attention_heads": config["num_attention_heads"],
        "num_key_value_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "hidden_act": config["hidden_act"],
        "rms_norm_eps": config["rms_norm_eps"],
        "max_position_embeddings": config["max_position_embeddings"],
        "vocab_size": config["target_vocab_size"],
        **rope_fields(config["rope_parameters"]),
    }


def rope_fields(rope: Config) -> Config:
    """Return rope fields in both forms: `rope_parameters` for transformers from 5 on, `rope_theta` and
    `rope_scaling` for other readers."""
    fields = {"rope_parameters": dict(rope), "rope_theta": rope["rope_theta"]}
    if rope.get("rope_type", "default") != "default":
        fields["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return fields


def special_tokens(config: PreTrainedConfig) -> Config:
    """Return the special tokens that the target has."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(config, name) for name in names if getattr(config, name, None) is not None}


def dtype_of(tensors: Tensors) -> torch.dtype:
    """Return the dtype of a drafter's weights."""
    return next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())


def embeddings(target: FrozenTarget) -> torch.Tensor:
    """Return the target's token embeddings [V, H]."""
    return target.model.get_input_embeddings().weight.detach()


def pack_own(config: Config, ids: torch.Tensor) -> Config:
    """Return the value of the key `OWN`, which holds what the layout cannot express: the drafter's config
    and, if it is smaller than the target's vocabulary, its draft vocabulary."""
    return {**config, **({"draft_ids": ids.tolist()} if len(ids) < config["target_vocab_size"] else {})}


def unpack_own(config: Config) -> tuple[Config, torch.Tensor]:
    """Return the inverse of `pack_own`, from a layout's `config.json`: the drafter's config and the target's
    ids of its draft vocabulary [D].

    Raises:
        UserError: the key is missing, because the folder was not exported from here, or damaged.
    """
    if not isinstance(config.get(OWN), dict):
        raise UserError(
            f"config.json: no key {OWN}, which names target and draft vocabulary; give a folder that "
            "`drafttrain export --to` wrote"
        )
    own = dict(config[OWN])
    check_own_config(own)
    ids = own.pop("draft_ids", None)
    if ids is None:
        return own, torch.arange(own["target_vocab_size"])
    if not isinstance(ids, list) or not all(_is(token, int) for token in ids):
        raise UserError(f"config.json: {OWN}.draft_ids must be a list of token ids; export it again")
    return own, check_ids(own, torch.tensor(ids, dtype=torch.int64))


def check_own_config(config: Config) -> None:
    """Check that a drafter's own config has all keys of its kind with values of the right type.

    Raises:
        UserError: it does not.
    """
    keys = {*get_annotations(DraftModelConfig), *OF_KIND.get(kind_of(config), ())} - UNREAD
    problems = [f"config.json lacks {key}" for key in sorted(keys - config.keys())]
    if not problems:
        try:
            AutoConfig.for_model(**copy.deepcopy(config))  # it changes rope fields
        except Exception as error:  # of its strict fields and of transformers' own checks
            problems.append(f"config.json: {brief(error)}")
    refuse("the drafter", "whole", problems)


def without_ids(tensors: Tensors) -> Tensors:
    """Return a drafter's tensors without the map of its draft vocabulary."""
    return {name: tensor for name, tensor in tensors.items() if name != IDS}


# heads


def full_head(rows: torch.Tensor, ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Return a head over all of the target's tokens [V, H] whose greedy drafts are those of the draft
    vocabulary's.

    Tokens outside the draft vocabulary get the mean of its rows. Their logit is then the mean of the draft
    vocabulary's logits for every state, so none of them is ever the most probable. Rows of zeros would win
    wherever all logits are negative. Their share in a softmax depends on the state (at most (V - D) / V,
    where all logits are equal).

    Args:
        rows: [D, H].
        ids: the target's ids of these rows [D].
    """
    head = rows.float().mean(0).to(rows.dtype).repeat(vocab_size, 1)  # [V, H]
    head[ids] = rows
    return head


def check_ids(config: Config, ids: torch.Tensor) -> torch.Tensor:
    """Check a draft vocabulary [D]; return it.

    Raises:
        UserError: its size is not that in the drafter's config, ids repeat, or some are no tokens of the
            target.
    """
    draft, size = config["draft_vocab_size"], config["target_vocab_size"]
    is_right = ids.dtype == torch.int64 and tuple(ids.shape) == (draft,) and draft > 0
    if not is_right or int(ids.min()) < 0 or int(ids.max()) >= size or len(ids.unique()) < draft:
        raise UserError(f"{IDS}: must be {draft} different tokens of {size}; export the drafter again")
    return ids


def check_drafter(config: Config, tensors: Tensors) -> torch.Tensor:
    """Check that a drafter is whole; return its draft vocabulary [D].

    Raises:
        UserError: tensors are missing, unexpected, of another shape or not finite, or `check_ids` refuses.
    """
    problems = tensor_problems(without_ids(tensors), *own_shapes(config))
    if IDS not in tensors:
        problems.append(f"no tensor {IDS}")
    refuse("the drafter", "whole", problems)
    return check_ids(config, tensors[IDS])


# checks


def config_problems(config: Config, required: Keys, optional: Keys) -> list[str]:
    """Return the problems with the keys of a `config.json`: missing, unknown, null or of another type."""
    problems = [f"config.json lacks {key}" for key in required if key not in config]
    for key, value in config.items():
        kind = required.get(key, optional.get(key))
        if kind is None:
            problems.append(f"config.json has {key}, which no reader knows")
        elif value is None:
            problems.append(f"config.json: {key} is null, which typed readers refuse")
        elif not _is(value, kind):
            name = kind.__name__ if isinstance(kind, type) else kind
            problems.append(f"config.json: {key} is {value!r}, not {name}")
    return problems


def _is(value: Any, kind: type | UnionType) -> bool:
    if isinstance(value, bool):  # for Python a bool is an int
        return kind is bool
    return isinstance(value, int | float if kind is float else kind)


def size_problems(config: Config) -> list[str]:
    """Return the problems with the sizes of layers whose fields have the right types."""
    problems = [
        f"config.json: {name} is {config[name]}, not above 0" for name in SIZES if config.get(name, 1) < 1
    ]
    if problems:
        return problems
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if heads % config["num_key_value_heads"]:
        problems.append(
            f"config.json: num_attention_heads is {heads}, no multiple of num_key_value_heads "
            f"({config['num_key_value_heads']})"
        )
    if "head_dim" not in config and hidden % heads:
        problems.append(
            f"config.json: hidden_size is {hidden}, no multiple of num_attention_heads ({heads}), and "
            "there is no head_dim"
        )
    return problems


def dtype_problems(config: Config, tensors: Tensors, key: str) -> list[str]:
    """Return a problem if the tensors' dtype is not the one that `config.json` gives."""
    found = {dtype_name(tensor.dtype) for tensor in tensors.values() if tensor.is_floating_point()}
    if key not in config or len(found) != 1 or found == {config[key]}:
        return []
    return [f"config.json: {key} is {config[key]}, and the tensors are {found.pop()}"]


def rope_problems(config: Config) -> list[str]:
    """Return the inconsistencies between the two forms of rope fields."""
    rope = config.get("rope_parameters")
    if rope is None:
        return []
    problems = []
    if not isinstance(rope, dict) or rope.get("rope_theta") != config.get("rope_theta"):
        problems.append("config.json: rope_theta is not that of rope_parameters")
    elif rope.get("rope_type", "default") != "default":
        scaling = config.get("rope_scaling")
        if scaling != {key: value for key, value in rope.items() if key != "rope_theta"}:
            problems.append("config.json: rope_scaling is not that of rope_parameters")
    return problems


def tensor_problems(tensors: Tensors, required: Shapes, optional: Shapes | None = None) -> list[str]:
    """Return the problems with a file's tensors: missing, unknown, of another shape or dtype, not finite."""
    optional = optional or {}
    problems = [f"no tensor {name}" for name in required if name not in tensors]
    floats = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(floats) > 1:
        problems.append(f"tensors of several types: {', '.join(sorted(map(dtype_name, floats)))}")
    for name, tensor in tensors.items():
        shape = required.get(name, optional.get(name))
        if shape is None:
            problems.append(f"unexpected tensor {name}")
        elif tuple(tensor.shape) != shape:
            problems.append(f"{name} is {list(tensor.shape)}, not {list(shape)}")
        elif tensor.dtype not in FLOATS:
            problems.append(
                f"{name} is {dtype_name(tensor.dtype)}, not {' or '.join(map(dtype_name, FLOATS))}"
            )
        elif tensor.numel() and not math.isfinite(tensor.float().abs().max()):
            problems.append(f"{name} holds numbers that are not finite")
    return problems


def refuse(folder: str | os.PathLike, what: str, problems: list[str]) -> None:
    """Raise UserError with the problems in one line, if there are any."""
    if problems:
        more = f" and {len(problems) - 4} more" if len(problems) > 4 else ""
        raise UserError(f"{folder}: not {what}: {'; '.join(problems[:4])}{more}; export it again")
