"""Targets that Python callers pass: a model loaded with transformers, or a name."""

import copy
import os
from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from drafttrain.inference.text import shown
from drafttrain.target_lm.loading import load_tokenizer
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.target_lm.tree_check import check_tree_support
from drafttrain.utils.errors import UserError
from drafttrain.utils.threads import limit_threads


def file_times(places: Iterable[Path]) -> list[tuple[str, int]]:
    """Return name and time of the last change (ns) of the files among these places, and of each file in the
    folders among them."""
    files = [file for place in places for file in (sorted(place.iterdir()) if place.is_dir() else [place])]
    return [(file.name, file.stat().st_mtime_ns) for file in files if file.is_file()]


def as_target(target: object, tokenizer: PreTrainedTokenizerBase | None = None) -> FrozenTarget | str:
    """Convert a target to what `load_bundle` takes; require that a transformers model can verify trees.

    Args:
        tokenizer: of a transformers model. None: the one in its folder or repository.

    Raises:
        UserError: it is no target, has no name to find its tokenizer by, or cannot verify trees.
    """
    if isinstance(target, FrozenTarget):
        return copy.copy(target)  # another decoder may use it, and its taps must not change
    if isinstance(target, str | os.PathLike):
        return str(target)
    if not isinstance(target, PreTrainedModel):
        raise UserError(f"target: must be a folder, a Hub id or a loaded model, got {shown(target)}")
    if tokenizer is None:
        if not target.name_or_path:
            raise UserError(
                "target: must know where its tokenizer is, got a model without name_or_path; set it"
            )
        tokenizer = load_tokenizer(target.name_or_path)
    trainable = [weight for weight in target.parameters() if weight.requires_grad]
    try:
        frozen = FrozenTarget(target, tokenizer, target.name_or_path or type(target).__name__)
    finally:
        for weight in trainable:  # decoding computes no gradients, but the caller may train the model later
            weight.requires_grad_(True)
    limit_threads()
    check_tree_support(frozen)
    return frozen
