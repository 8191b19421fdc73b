"""Training speed of a drafter, relative to the forward of the target alone on the same machine.

Online training runs the target inside each step, so its speed is bounded by the bare target's; training over
stored hidden states leaves the target out. They take turns in one process, several rounds long.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from datasets import Dataset, DatasetDict
from transformers import PrinterCallback

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.model import DraftModel
from drafttrain.hidden_states.collect import collect_states
from drafttrain.hidden_states.store import HiddenStateStore
from drafttrain.target_lm.config import CollectConfig
from drafttrain.target_lm.info import target_info
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.target_lm.throughput import forward_speed
from drafttrain.training.config import TrainingConfig
from drafttrain.training.packing import PackedRows
from drafttrain.training.train import new_optimizer, settle_bf16, start_drafter, training_arguments
from drafttrain.training.trainer import DraftTrainer

SHAPES = (
    (2, 1024),
    (4, 512),
    (8, 256),
    (16, 128),
    (32, 64),
    (8, 512),
    (8, 128),
    (16, 64),
    (8, 64),
)  # rows x tokens of one bare forward
FINALISTS = 2  # shapes that are measured in every round


@dataclass
class TrainingSpeed:
    """Tokens per second, one value per round; padding does not count as tokens.

    Attributes:
        online: training with the target inside the step.
        offline: training over stored hidden states.
        forward: the bare target by batch shape ("4x512").
    """

    online: list[float]
    offline: list[float]
    forward: dict[str, list[float]]

    @property
    def best_forward(self) -> float:
        """Return the speed of the bare target at its best shape."""
        return max(map(statistics.median, self.forward.values()))

    @property
    def median_online(self) -> float:
        return statistics.median(self.online)

    @property
    def train_ratio(self) -> float:
        """Return online training relative to the bare target."""
        return self.median_online / self.best_forward

    @property
    def offline_ratio(self) -> float:
        """Return training over stored hidden states relative to online training."""
        return statistics.median(self.offline) / self.median_online


def training_speed(
    config: TrainingConfig,
    drafter_config: DrafterConfig,
    target: FrozenTarget,
    documents: Dataset,
    folder: Path,
    rounds: int = 5,
    steps: int = 3,
    shapes: Sequence[tuple[int, int]] = SHAPES,
) -> TrainingSpeed:
    """Measure training steps of a recipe through the Trainer, with its data loading and optimizer.

    Args:
        documents: a corpus split; some hundred documents, because few leave much padding in packed rows.
        folder: for stored hidden states and the Trainer's files.
        rounds: number of turns of each.
        steps: timed steps per turn; one more is not timed.
    """
    drafter = start_drafter(config, drafter_config, target, documents)
    collect_states(
        CollectConfig(mode="offline"), target, DatasetDict(train=documents), folder / "hidden_states"
    )
    store = HiddenStateStore.open(folder / "hidden_states" / "train", target_info(target), documents)
    online = PackedRows(documents, config.row_length, 0)
    offline = PackedRows(documents, config.row_length, 0, store)

    first_look = {shape: forward_speed(target, *shape) for shape in shapes}
    finalists = sorted(first_look, key=first_look.get, reverse=True)[:FINALISTS]
    speed = TrainingSpeed([], [], {f"{rows}x{length}": [] for rows, length in finalists})
    for number in range(rounds):
        speed.online.append(train_some(config, drafter, target, online, steps, number, folder))
        speed.offline.append(train_some(config, drafter, target, offline, steps, number, folder))
        for rows, length in finalists:
            speed.forward[f"{rows}x{length}"].append(forward_speed(target, rows, length))
    return speed


def train_some(
    config: TrainingConfig,
    drafter: DraftModel,
    target: FrozenTarget,
    rows: PackedRows,
    steps: int,
    seed: int,
    folder: Path,
) -> float:
    """Return the tokens per second of some optimizer steps, from the training log."""
    config = replace(
        settle_bf16(config, target),
        max_steps=steps + 1,
        logging_steps=1,
        seed=seed,
        report_to="none",
        deepspeed=None,
        warmup_steps=0,
    )
    arguments = training_arguments(config, folder / "trainer")
    arguments.eval_strategy = arguments.save_strategy = "no"
    arguments.disable_tqdm = True
    trainer = DraftTrainer(
        model=drafter,
        args=arguments,
        train_dataset=rows,
        optimizers=(new_optimizer(config, drafter), None),
        target=target,
        block_length=tuple(config.block_length),
        kl_chunk=config.kl_chunk,
        mask_seed=seed,
        rate=lambda step: 1.0,
        evaluate_drafter=lambda drafter: {},
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "tokens_per_second" in entry]
    timed = logged[1:]  # the first step pays for setting everything up
    return sum(e["tokens"] for e in timed) / sum(e["tokens"] / e["tokens_per_second"] for e in timed)
