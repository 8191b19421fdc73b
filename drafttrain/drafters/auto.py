"""Find the model class of a kind of drafter, and load drafters of any kind."""

import os
from importlib import import_module

import torch

from drafttrain.drafters.config import KINDS, kind_of, read_config
from drafttrain.drafters.model import DraftModel
from drafttrain.target_lm.model import FrozenTarget


def model_class(kind: str) -> type[DraftModel]:
    """Return the class of a kind's models."""
    module, _, name = KINDS[kind].model.partition(".")
    return getattr(import_module(f"drafttrain.drafters.{module}"), name)


def load_drafter(
    folder: str | os.PathLike, target: FrozenTarget, dtype: torch.dtype | None = None
) -> DraftModel:
    """Load a drafter of any kind (see `DraftModel.load`).

    Raises:
        UserError: no drafter there, a damaged one, or one of another target.
    """
    return model_class(kind_of(read_config(folder))).load(folder, target, dtype)
