"""Find the checkpoint from which an interrupted training continues."""

import os
import zipfile
from pathlib import Path

from safetensors import SafetensorError, safe_open

from drafttrain.training.best import COMPUTED, STATE
from drafttrain.training.config import TrainingConfig
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json
from drafttrain.utils.provenance import content_hashes


def last_whole_checkpoint(folder: Path) -> Path | None:
    """Return the newest complete checkpoint; half-written and damaged ones are skipped. (The Trainer's own
    search only takes the highest number.)
    """
    found = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")}
    numbered = {path: int(number) for path, number in found.items() if number.isdecimal()}
    for path in sorted(numbered, key=numbered.get, reverse=True):
        states = (path / "optimizer.pt").exists() or any(path.glob("global_step*"))  # DeepSpeed has its own
        if not states or not (path / "scheduler.pt").exists():  # the Trainer would begin them again
            continue
        try:
            read_json(path / STATE)
            written = read_json(path / COMPUTED).get("files", {}) if (path / COMPUTED).exists() else {}
            if not written.items() <= content_hashes(path).items():
                continue
            for weights in path.rglob("*.safetensors"):
                with safe_open(weights, "pt"):  # checks the file's length against its header
                    pass
        except (UserError, SafetensorError, AttributeError):  # missing, cut short, or no record
            continue
        if all(zipfile.is_zipfile(file) for file in path.rglob("*.pt*")):
            return path
    return None


def check_same_launch(config: TrainingConfig, checkpoint: Path) -> None:
    """Validate that DeepSpeed and the number of processes are the checkpoint's: steps depend on them.

    Raises:
        UserError: the checkpoint was written under DeepSpeed and this run is not, or the other way round; or
            by another number of processes.
    """
    theirs, ours = any(checkpoint.glob("global_step*")), config.deepspeed is not None
    processes = int(os.environ.get("WORLD_SIZE") or 1)
    computed = read_json(checkpoint / COMPUTED) if (checkpoint / COMPUTED).exists() else {}
    begun = computed.get("processes", processes)
    words = None
    if theirs != ours:
        words = ("with DeepSpeed", "without it") if theirs else ("without DeepSpeed", "with it")
    elif begun != processes:
        words = f"by {begun} processes", f"by {processes}"
    if words:
        raise UserError(
            f"{checkpoint}: this training was begun {words[0]} and would continue {words[1]}; launch it as "
            "before, or delete the checkpoints"
        )


def begun_in_bf16(config: TrainingConfig, checkpoint: Path) -> bool | None:
    """Return whether a checkpoint's steps were computed in bf16; None if it is not recorded.

    Raises:
        UserError: they were, and the settings ask for fp32, or the other way round.
    """
    path = checkpoint / COMPUTED
    begun = read_json(path)["bf16"] if path.exists() else None
    if begun is not None and config.bf16 not in ("auto", begun):
        was = str(begun).lower()
        raise UserError(
            f"training.bf16: must be {was}, as {checkpoint} was trained, got {str(config.bf16).lower()}; set "
            f"it to {was} or auto, or delete the checkpoints"
        )
    return begun


def elapsed(checkpoint: Path) -> float:
    """Return the seconds of training up to a checkpoint."""
    history = read_json(checkpoint / STATE)["log_history"]
    return max((entry.get("elapsed", 0.0) for entry in history), default=0.0)
