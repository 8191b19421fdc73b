"""Training speed of a drafter, relative to the forward of the target alone on the same machine.

Online training runs the target inside each step, so its speed is bounded by the bare target's; training over
stored hidden states leaves the target out. They take turns in one process, several rounds long.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from datasets import Dataset, DatasetDict

from drafttrain.drafters.config import DrafterConfig
from drafttrain.hidden_states.collect import collect_states
from drafttrain.hidden_states.store import HiddenStateStore
from drafttrain.target_lm.config import CollectConfig
from drafttrain.target_lm.info import target_info
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.training.config import TrainingConfig
from drafttrain.training.packing import PackedRows
from drafttrain.training.speed import train_some
from drafttrain.training.train import start_drafter

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


@torch.no_grad()
def forward_speed(target: FrozenTarget, rows: int, length: int, repeats: int = 3) -> float:
    """Return tokens per second of the target without LM head over full rows, the median of some forwards."""
    length = min(length, getattr(target.config, "max_position_embeddings", None) or length)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (rows, length), generator=generator)  # [rows, length]
    ids = ids.to(target.device)
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        out = target.base(input_ids=ids, use_cache=False).last_hidden_state
        out[0, 0, 0].item()  # waits for the device
        seconds.append(time.perf_counter() - started)
    return rows * length / statistics.median(seconds)
