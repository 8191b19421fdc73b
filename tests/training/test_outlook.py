"""Trainings that cannot work give a warning before they run; those of the committed recipes give none."""

from pathlib import Path

import pytest

from drafttrain.run.recipe import load_recipe
from drafttrain.training.config import TrainingConfig
from drafttrain.training.outlook import doubts, doubts_about_vocabulary

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
STEP = 2048  # tokens


@pytest.mark.parametrize(
    "settings, steps, expected",
    [
        ({"lr": 1e-3}, 1, ["1 optimizer steps: too few"]),
        ({"lr": 1e-3}, 100, []),
        ({"lr": 1e-3, "warmup_steps": 100}, 14, ["training.warmup_steps: 100", "14 optimizer steps"]),
        ({"lr": 1e-3, "warmup_steps": 100}, 101, []),
        ({"lr": 1e-4}, 400, ["training.lr: 0.0001 is too low for 0.82 M tokens"]),
        ({"lr": 1e-4}, 35_000, []),  # the paper's 70 M tokens
        ({"lr": 1e-5, "init_from": "x"}, 3, []),
        ({"lr": 1e-5, "init_from": "x", "warmup_steps": 3}, 3, ["training.warmup_steps: 3"]),
    ],
)
def test_doubts(settings, steps, expected):
    found = doubts(TrainingConfig(**settings), steps, STEP)
    assert len(found) == len(expected)
    assert all(line.startswith(start) and "\n" not in line for line, start in zip(found, expected))


@pytest.mark.parametrize("path", [p for p in RECIPES if p.stem != "regenerate-smollm2"], ids=lambda p: p.stem)
def test_committed_recipes_are_not_doubted(path):
    config = load_recipe(path).training
    assert doubts(config, 1000, config.rows_per_batch * config.row_length) == []


def test_the_draft_vocabulary():
    assert doubts_about_vocabulary(0.05, "the text") == []
    (line,) = doubts_about_vocabulary(0.78, "the text")
    assert line.startswith("drafter.draft_vocab_size: 78% of the text is outside the draft vocabulary")
