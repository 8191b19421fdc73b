"""A run whose drafter is trained already."""

import os
import shutil
from pathlib import Path

from drafttrain.drafters.config import read_config
from drafttrain.utils.folders import new_folder


def take_drafter(init_from: str | os.PathLike, out: str | os.PathLike) -> Path:
    """Copy a trained drafter to `out/drafter`, where `train` would write one, without the results and
    calibrations beside it.

    Raises:
        UserError: there is none.
    """
    read_config(init_from)
    with new_folder(Path(out) / "drafter") as folder:
        for name in ("config.json", "model.safetensors"):
            shutil.copyfile(Path(init_from) / name, folder / name)
    return Path(out) / "drafter"
