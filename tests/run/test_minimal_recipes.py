"""A target and the path of a corpus are enough of a recipe, for every kind of drafter."""

import json
import random
from pathlib import Path

import pytest

from drafttrain.run.cli import main
from drafttrain.run.recipe import load_recipe
from tests.conftest import SENTENCES

OTHERS = {"causal_lm": ["--drafter.model", "target"]}  # there is no small LM that fits any target


@pytest.fixture
def recipe(tmp_path, monkeypatch, tiny_target_folder) -> str:
    monkeypatch.chdir(tmp_path)
    Path("target").symlink_to(tiny_target_folder)
    turns = [[("human", random.choice(SENTENCES)), ("gpt", random.choice(SENTENCES))] for _ in range(50)]
    rows = [{"conversations": [{"from": who, "value": text} for who, text in turn]} for turn in turns]
    Path("chats.json").write_text(json.dumps(rows), encoding="utf-8")
    Path("own.yaml").write_text("target: {model: target}\ncorpus: {sources: [{path: chats.json}]}\n")
    return "own.yaml"


@pytest.mark.parametrize("kind", ["edd", "vdm", "eagle", "medusa", "causal_lm"])
def test_every_kind_is_trained(kind, recipe):
    assert main(["run", recipe, "--drafter.kind", kind, *OTHERS.get(kind, [])]) == 0
    assert json.loads(Path("runs/own/summary.json").read_text())["train_tokens"] > 0
    assert json.loads(Path("runs/own/bundle/config.json").read_text())["model_type"] == f"drafttrain_{kind}"


def test_the_longest_example_and_its_row_follow_each_other(recipe):
    def lengths(*words: str) -> tuple[int, int]:
        found = load_recipe(recipe, words)
        return found.corpus.max_length, found.training.row_length

    assert lengths() == (512, 512)
    assert lengths("--training.row_length", "2048") == (2048, 2048)
    assert lengths("--training.row_length", "256") == (256, 256)
    assert lengths("--corpus.max_length", "300") == (300, 512)
    assert lengths("--corpus.max_length", "3000") == (3000, 3000)
    assert lengths("--corpus.max_length", "300", "--training.row_length", "400") == (300, 400)
