"""Permission to read pickled weights, which can run any program: they are read only if the user asks."""

import os
from pathlib import Path

from drafttrain.utils.errors import UserError

ALLOW = "DRAFTTRAIN_ALLOW_PICKLES"  # environment variable; 1 allows them
ENDINGS = ("bin", "pt", "pth", "ckpt")


def are_allowed(place: str) -> bool:
    """Return whether weights may be read from pickles.

    Args:
        place: a model's folder without safetensors, or its Hub id.

    Raises:
        UserError: the folder has pickles, which are not allowed.
    """
    if os.environ.get(ALLOW) == "1":
        return True
    if found := sorted(path.name for ending in ENDINGS for path in Path(place).glob(f"*.{ending}")):
        raise UserError(
            f"{place}: weights must be safetensors, got {found[0]}, a pickle, which can run any program; "
            f"save the model with save_pretrained, or set {ALLOW}=1 if you trust it"
        )
    return False
