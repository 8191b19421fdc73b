"""Resume a training that was interrupted after its last step: the Trainer would make one more."""

from pathlib import Path

from safetensors.torch import load_file
from transformers import TrainerState

from drafttrain.training.best import STATE, KeepBest
from drafttrain.training.trainer import DraftTrainer


def take_up(trainer: DraftTrainer, keeper: KeepBest, checkpoint: Path) -> None:
    """Load the state and the drafter of a checkpoint, and log the closing line."""
    trainer.state = TrainerState.load_from_json(str(checkpoint / STATE))
    trainer.state.is_world_process_zero = trainer.args.process_index == 0  # not as the first rank wrote it
    keeper.on_train_begin(trainer.args, trainer.state, trainer.control)
    trainer.model.load_state_dict(load_file(checkpoint / "model.safetensors"), strict=False)
    trainer.log({"train_loss": 0.0})
