"""Drafters by their kind: made new for a target, or loaded whatever they are."""

import os

import torch

from drafttrain.drafters.causal_lm import CausalLmModel
from drafttrain.drafters.config import DrafterConfig, read_config
from drafttrain.drafters.eagle import EagleModel
from drafttrain.drafters.edd import EddModel
from drafttrain.drafters.medusa import MedusaModel
from drafttrain.drafters.model import DraftModel
from drafttrain.drafters.vdm import VdmModel
from drafttrain.target_lm.model import FrozenTarget

KINDS: dict[str, type[DraftModel]] = {
    "edd": EddModel,
    "vdm": VdmModel,
    "eagle": EagleModel,
    "medusa": MedusaModel,
    "causal_lm": CausalLmModel,
}


def new_drafter(target: FrozenTarget, drafter: DrafterConfig, draft_ids: torch.Tensor) -> DraftModel:
    """A drafter of a recipe's kind and shape that starts from the target, in fp32.

    Args:
        draft_ids: target ids that it can draft, ascending, [D].

    Raises:
        UserError: the target cannot have such a drafter.
    """
    kind = KINDS[drafter.kind]
    if kind is CausalLmModel:
        drafter.check()
        model = CausalLmModel.from_small_lm(target, drafter, draft_ids)
    else:
        model = kind(kind.config_class.for_target(target, drafter, len(draft_ids)))
    model.initialize_from(target, drafter, draft_ids)
    return model.to(target.device)


def load_drafter(
    folder: str | os.PathLike, target: FrozenTarget, dtype: torch.dtype | None = None
) -> DraftModel:
    """Loads a drafter of any kind (see `DraftModel.load`).

    Raises:
        UserError: no drafter there, a damaged one, or one of another target.
    """
    name = read_config(folder)["model_type"].removeprefix("drafttrain_")
    return KINDS[name].load(folder, target, dtype)
