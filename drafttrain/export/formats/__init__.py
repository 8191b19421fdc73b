"""Export drafters to layouts of other tools, and import them from there.

causal-lm   a VDM as a plain causal LM: transformers (`assistant_model`), vLLM (`draft_model`)
eagle       EAGLE-1: vLLM (`eagle`), the authors' code
medusa      MEDUSA-1 for vLLM (`medusa`)
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from drafttrain.bundle import find_bundle
from drafttrain.drafters.config import kind_of, read_config
from drafttrain.drafters.model_config import check_identity
from drafttrain.export.formats import causal_lm, eagle, layout, medusa
from drafttrain.export.formats.layout import Config, Layout, TargetParts, Tensors
from drafttrain.target_lm.loading import load_target
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError

DTYPES = tuple(map(layout.dtype_name, layout.FLOATS))


@dataclass(frozen=True)
class Format:
    """A layout of another tool.

    Attributes:
        kinds: of the drafters that it can express.
        to, back: the exporter and its inverse.
        problems: lists the problems of a folder.
        name: for messages.
        check: refuses drafters that the layout cannot express, by their config.
        serve: vLLM's `method`; None where the layout is not for vLLM.
        with_tokenizer: whether the folder includes the target's tokenizer.
    """

    kinds: tuple[str, ...]
    to: Callable[[Config, Tensors, TargetParts], Layout]
    back: Callable[[Config, Tensors], tuple[Config, Tensors]]
    problems: Callable[[Config, Tensors], list[str]]
    name: str
    check: Callable[[Config], None] = lambda config: None
    serve: str | None = None
    with_tokenizer: bool = False


FORMATS = {
    "causal-lm": Format(
        ("vdm", "causal_lm"),
        causal_lm.to_causal_lm,
        causal_lm.from_causal_lm,
        causal_lm.causal_lm_problems,
        "a causal LM of a known kind",
        causal_lm.check_causal_lm,
        "draft_model",
        with_tokenizer=True,
    ),
    "eagle": Format(
        ("eagle",),
        eagle.to_eagle,
        eagle.from_eagle,
        eagle.eagle_problems,
        "in EAGLE-1's layout",
        eagle.check_eagle,
        "eagle",
    ),
    "medusa": Format(
        ("medusa",),
        medusa.to_medusa,
        medusa.from_medusa,
        medusa.medusa_problems,
        "MEDUSA heads for vLLM",
        serve="medusa",
    ),
}


def find_format(name: str) -> Format:
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
    target: FrozenTarget | TargetParts | str | None = None,
    dtype: str | None = "bfloat16",
) -> Layout:
    """Write a bundle's drafter in another tool's layout, checked.

    Args:
        format: one of `FORMATS`.
        bundle: a bundle, the folder of a trained drafter, or a Hub id.
        target: a loaded target, or as `load_target` takes it. None: the one that the bundle names.
        dtype: of the exported weights; None for that of the bundle's.

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
    _check_kind(config, known, format, folder)
    with _about(folder):
        layout.check_own_config(config)
        known.check(config)
    tensors = layout.read_tensors(folder / layout.WEIGHTS)
    if dtype is not None:
        wide = getattr(torch, dtype)
        tensors = {
            n: tensor.to(wide) if tensor.is_floating_point() else tensor for n, tensor in tensors.items()
        }
    parts = target if isinstance(target, TargetParts) else _parts(config, target, folder)
    with _about(folder):
        found = known.to(config, tensors, parts)
    layout.refuse(folder, known.name, known.problems(found.config, found.tensors))
    layout.write(out, found, parts.tokenizer if known.with_tokenizer else None)
    return found


def validate(format: str, folder: str | os.PathLike) -> None:
    """Check a folder in another tool's layout, ours or anybody's: keys, types, shapes.

    Raises:
        UserError: the problems.
    """
    known = find_format(format)
    layout.refuse(folder, known.name, known.problems(*layout.read(folder)))


def import_from(format: str, folder: str | os.PathLike, out: str | os.PathLike) -> None:
    """Write an export as a drafter's folder again.

    Raises:
        UserError: the folder is damaged, or was not exported from here, or `out` is not empty.
    """
    known = find_format(format)
    layout.check_empty(out)
    validate(format, folder)
    read = layout.read(folder)
    with _about(folder):
        own, _ = layout.unpack_own(read[0])
    _check_kind(own, known, format, Path(folder))
    with _about(folder):
        config, tensors = known.back(*read)
        layout.check_drafter(config, tensors)
    layout.write(out, Layout(config, tensors), what="the drafter")


@contextmanager
def _about(folder: str | os.PathLike) -> Iterator[None]:
    """Put the folder before messages."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{folder}: {error}") from None


def _check_kind(config: Config, known: Format, format: str, folder: Path) -> None:
    kind = kind_of(config)
    if kind not in known.kinds:
        fitting = [name for name, other in FORMATS.items() if kind in other.kinds]
        remedy = (
            f"export it to {' or '.join(fitting)}"
            if fitting
            else "no other engine gives such drafters what they read"
        )
        raise UserError(
            f"{folder}: must be a drafter of kind {' or '.join(known.kinds)} for {format}, "
            f"got {kind}; {remedy}"
        )


def _parts(config: Config, target: FrozenTarget | str | None, folder: Path) -> TargetParts:
    """Return the parts of a target, which is loaded unless it is given."""
    if not isinstance(target, FrozenTarget):
        name = target or config["target"].get("name")
        if name is None:
            raise UserError(f"{folder}: no target in config.json; name one with --target")
        target = load_target(name, dtype="stored", device="cpu")
    with _about(folder):
        check_identity(config["target"], target)
    return TargetParts.of(target)
