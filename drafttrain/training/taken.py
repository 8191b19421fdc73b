"""Use a trained drafter without training (`training.max_steps: 0`)."""

import os
import shutil
from pathlib import Path

from drafttrain.drafters.config import FILES, read_config
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import require_file
from drafttrain.utils.folders import new_folder


def take_drafter(init_from: str | os.PathLike, out: str | os.PathLike) -> Path:
    """Copy a trained drafter to `out/drafter`, where `train` would write one, without the results and
    calibrations beside it.

    Raises:
        UserError: there is none, or its weights are missing.
    """
    read_config(init_from)
    with new_folder(Path(out) / "drafter") as folder:
        for name in FILES:
            if not (Path(init_from) / name).exists():
                raise UserError(f"{Path(init_from) / name}: no such file; give the folder of a drafter")
            require_file(Path(init_from) / name)
            shutil.copyfile(Path(init_from) / name, folder / name)
    return Path(out) / "drafter"
