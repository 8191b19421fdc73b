"""Targets as programs give them: loaded with transformers, or by name."""

import copy
import os

from transformers import PreTrainedModel

from drafttrain.inference.text import shown
from drafttrain.target_lm.loading import load_tokenizer
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.target_lm.tree_check import check_tree_support
from drafttrain.utils.errors import UserError
from drafttrain.utils.threads import limit_threads


def as_target(target: object) -> FrozenTarget | str:
    """Return a target as `load_bundle` takes it; a model loaded with transformers is checked to verify trees.

    Raises:
        UserError: it is no target, has no name to find its tokenizer by, or does not verify trees.
    """
    if isinstance(target, FrozenTarget):
        return copy.copy(target)  # which may be another decoder's, whose taps stay as they are
    if isinstance(target, str | os.PathLike):
        return str(target)
    if not isinstance(target, PreTrainedModel):
        raise UserError(f"target: must be a folder, a Hub id or a loaded model, got {shown(target)}")
    if not target.name_or_path:
        raise UserError("target: must know where its tokenizer is, got a model without name_or_path; set it")
    frozen = FrozenTarget(target, load_tokenizer(target.name_or_path), target.name_or_path)
    limit_threads()
    check_tree_support(frozen)
    return frozen
