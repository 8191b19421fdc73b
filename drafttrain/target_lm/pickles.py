"""Pickles of weights can run any program when they are read, so they are only where the user asks for it."""

import os
from pathlib import Path

from drafttrain.utils.errors import UserError

ALLOW = "DRAFTTRAIN_ALLOW_PICKLES"  # environment variable: 1 reads them
ENDINGS = ("bin", "pt", "pth", "ckpt")


def are_allowed(place: str) -> bool:
    """Return whether pickles may be read.

    Args:
        place: a model's folder without safetensors, or its Hub id.

    Raises:
        UserError: the folder has pickles, and they may not.
    """
    if os.environ.get(ALLOW) == "1":
        return True
    if found := sorted(path.name for ending in ENDINGS for path in Path(place).glob(f"*.{ending}")):
        raise UserError(
            f"{place}: weights must be safetensors, got {found[0]}, a pickle, which can run any program; "
            f"save the model with save_pretrained, or set {ALLOW}=1 if you trust it"
        )
    return False
