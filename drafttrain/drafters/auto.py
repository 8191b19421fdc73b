"""Drafters by their kind: created for a target, or loaded."""

import os
from importlib import import_module

import torch

from drafttrain.drafters.config import KINDS, DrafterConfig, kind_of, read_config
from drafttrain.drafters.model import DraftModel
from drafttrain.target_lm.model import FrozenTarget


def model_class(kind: str) -> type[DraftModel]:
    """Return the class of a kind's models."""
    module, _, name = KINDS[kind].model.partition(".")
    return getattr(import_module(f"drafttrain.drafters.{module}"), name)


def new_drafter(target: FrozenTarget, drafter: DrafterConfig, draft_ids: torch.Tensor) -> DraftModel:
    """Return a drafter of a recipe's kind and shape that starts from the target, in fp32.

    Args:
        draft_ids: target ids that it can draft, ascending, [D].

    Raises:
        UserError: the target cannot have such a drafter.
    """
    drafter.check()
    model = model_class(drafter.kind).create(target, drafter, draft_ids)
    model.initialize_from(target, drafter, draft_ids)
    return model.to(target.device)


def load_drafter(
    folder: str | os.PathLike, target: FrozenTarget, dtype: torch.dtype | None = None
) -> DraftModel:
    """Load a drafter of any kind (see `DraftModel.load`).

    Raises:
        UserError: no drafter there, a damaged one, or one of another target.
    """
    return model_class(kind_of(read_config(folder))).load(folder, target, dtype)
