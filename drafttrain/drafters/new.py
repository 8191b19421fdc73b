"""Make a new drafter for a target."""

import torch

from drafttrain.drafters.auto import model_class
from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.model import DraftModel
from drafttrain.target_lm.model import FrozenTarget


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
