"""Export drafters to layouts of other tools, and import them from there.

causal-lm   a VDM as a plain causal LM: transformers (`assistant_model`), vLLM (`draft_model`)
eagle       EAGLE-1: vLLM (`eagle`), the authors' code
medusa      MEDUSA-1 for vLLM (`medusa`)

Each is a module with `NAME` for messages, `KINDS` of drafters that it can express, vLLM's method `SERVE`, and

    check(config)                                     raises if a drafter is incomplete or cannot be expressed
    to_layout(config, tensors, target) -> Layout
    from_layout(config, tensors) -> config, tensors   the inverse, for what was exported from here
    problems(config, tensors) -> list[str]            what is wrong with a folder in this layout
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from drafttrain.bundle import find_bundle
from drafttrain.drafters.config import kind_of, read_config
from drafttrain.drafters.model_config import check_identity
from drafttrain.export.formats import causal_lm, eagle, layout, medusa
from drafttrain.export.formats.layout import Config, Layout
from drafttrain.kernels.machine import dtype_name
from drafttrain.target_lm.loading import load_target
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError

DTYPES = tuple(map(dtype_name, layout.FLOATS))
FORMATS = {"causal-lm": causal_lm, "eagle": eagle, "medusa": medusa}


def find_format(name: str) -> ModuleType:
    """Return the format of this name.

    Raises:
        UserError: there is none.
    """
    if name not in FORMATS:
        raise UserError(f"format: must be one of {', '.join(FORMATS)}, got {name}")
    return FORMATS[name]


def export_to(
    format: str,
    bundle: str | os.PathLike,
    out: str | os.PathLike,
    target: FrozenTarget | str | None = None,
    dtype: str | None = "bfloat16",
) -> Layout:
    """Write a bundle's drafter in another tool's layout, checked.

    Args:
        format: one of `FORMATS`.
        bundle: a bundle, the folder of a trained drafter, or a Hub id.
        target: a loaded target, or as `load_target` takes it. None: the one that the bundle names.
        dtype: of the exported weights. None: the same as the bundle's.

    Returns:
        the layout that was written.

    Raises:
        UserError: the format is for drafters of another kind or cannot express this one, the drafter is
            damaged, or `out` holds something else than an export.
    """
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"dtype: must be one of {', '.join(DTYPES)}, got {dtype}")
    known, folder = find_format(format), find_bundle(bundle)
    layout.check_place(out)
    config = read_config(folder)
    _check_kind(config, format, folder)
    tensors = layout.read_tensors(folder / layout.WEIGHTS)
    dtype = dtype or config.get("dtype")  # one for all tensors, also where matrices were int8
    if dtype in DTYPES:
        wide = getattr(torch, dtype)
        tensors = {n: t.to(wide) if t.is_floating_point() else t for n, t in tensors.items()}
    with _about(folder):
        known.check(config)
    if not isinstance(target, FrozenTarget):
        name = target or config["target"].get("name")
        if name is None:
            raise UserError(f"{folder}: no target in config.json; name one with --target")
        target = load_target(name, dtype="stored", device="cpu")
    with _about(folder):
        check_identity(config["target"], target)
        exported = known.to_layout(config, tensors, target)
    layout.refuse(folder, known.NAME, known.problems(exported.config, exported.tensors))
    layout.write(out, exported)
    return exported


def validate(format: str, folder: str | os.PathLike) -> None:
    """Check keys, types and shapes of a folder in another tool's layout, exported by us or by others.

    Raises:
        UserError: there are problems; it names them.
    """
    known = find_format(format)
    layout.refuse(folder, known.NAME, known.problems(*layout.read(folder)))


def import_from(format: str, folder: str | os.PathLike, out: str | os.PathLike) -> None:
    """Convert an export back into a drafter's folder.

    Raises:
        UserError: the folder is damaged, or was not exported from here, or `out` is not empty.
    """
    layout.check_place(out, replace=False)
    validate(format, folder)
    config, tensors = layout.read(folder)
    if isinstance(config.get(layout.OWN), dict):
        _check_kind(config[layout.OWN], format, folder)
    with _about(folder):
        config, tensors = find_format(format).from_layout(config, tensors)
        layout.check_drafter(config, tensors)
    layout.write(out, Layout(config, tensors), what="the drafter")


@contextmanager
def _about(folder: str | os.PathLike) -> Iterator[None]:
    """Prefix the message of a UserError with the folder."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None


def _check_kind(config: Config, format: str, folder: str | os.PathLike) -> None:
    kind, known = kind_of(config), FORMATS[format]
    if kind not in known.KINDS:
        fitting = [name for name, other in FORMATS.items() if kind in other.KINDS]
        remedy = (
            f"export it to {' or '.join(fitting)}"
            if fitting
            else "no other engine gives such drafters what they read"
        )
        raise UserError(
            f"{folder}: must be a drafter of kind {' or '.join(known.KINDS)} for {format}, got {kind}; "
            f"{remedy}"
        )
