"""Training speed: that it comes from real steps and counts real tokens; how fast they are is not tested."""

from datasets import Dataset

from drafttrain.drafters.config import DrafterConfig
from drafttrain.training.config import TrainingConfig
from studies import training_speed as module
from studies.training_speed import TrainingSpeed, forward_speed, training_speed


def documents(n: int) -> Dataset:
    rows = [[(7 * i + j) % 500 for j in range(20 + i % 9)] for i in range(n)]
    return Dataset.from_dict(
        {"id": [str(i) for i in range(n)], "input_ids": rows, "loss_mask": [[1] * len(row) for row in rows]}
    )


def test_ratios_are_of_medians():
    speed = TrainingSpeed(online=[1, 5, 2], offline=[8, 6, 7], forward={"1x8": [4, 4, 1], "2x8": [9, 3, 2]})
    assert speed.best_forward == 4 and speed.median_online == 2
    assert speed.train_ratio == 0.5 and speed.offline_ratio == 3.5


def test_training_speed_takes_turns(tiny_target, tmp_path, monkeypatch):
    order, real = [], module.train_some

    def noted(config, drafter, target, rows, *rest):
        order.append("offline" if rows.store is not None else "online")
        return real(config, drafter, target, rows, *rest)

    monkeypatch.setattr(module, "train_some", noted)
    config = TrainingConfig(
        rows_per_batch=1, row_length=64, block_length=(2, 4), gradient_accumulation_steps=2
    )
    drafter = DrafterConfig(tapped_blocks=[-2], draft_vocab_size=100)
    shapes = ((1, 16), (2, 16), (1, 32))
    speed = training_speed(
        config, drafter, tiny_target, documents(60), tmp_path, rounds=2, steps=2, shapes=shapes
    )
    assert order == ["online", "offline"] * 2
    assert len(speed.online) == len(speed.offline) == 2 and min(speed.online + speed.offline) > 0
    assert len(speed.forward) == 2 and all(len(values) == 2 for values in speed.forward.values())


def test_forward_speed_is_tokens_over_the_median_time(tiny_target, monkeypatch):
    clock = iter([0.0, 1.0, 1.0, 6.0, 6.0, 8.0])  # forwards of 1, 5 and 2 seconds
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    assert forward_speed(tiny_target, rows=2, length=8, repeats=3) == 2 * 8 / 2


def test_forward_speed_stays_within_the_positions_of_the_target(tiny_target):
    assert forward_speed(tiny_target, rows=1, length=100_000, repeats=1) > 0
