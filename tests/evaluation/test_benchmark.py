"""The evaluation stage end to end on a tiny target with a random drafter."""

import json

import pytest

from drafttrain.errors import UserError
from drafttrain.evaluation import benchmark
from drafttrain.evaluation.benchmark import EvaluateConfig, evaluate
from drafttrain.evaluation.prompts import PromptSet


@pytest.fixture
def config(questions) -> EvaluateConfig:
    chats = PromptSet("chats", str(questions), limit=2, turns=2)
    first = PromptSet("first turns", str(questions), limit=3)
    return EvaluateConfig(
        prompts=[chats, first],
        tune_prompts=PromptSet("tune", str(questions), limit=1),
        draft_lengths=[1, 3],
        max_new_tokens=12,
        repeats=2,
        lossless_prompts=3,
        lossless_new_tokens=10,
    )


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(benchmark, "check_quiet", lambda refuse: None)


def test_end_to_end(config, tiny_bundle, tmp_path, capsys):
    figures = evaluate(config, tiny_bundle, tmp_path / "out", dtype="float32")
    print(capsys.readouterr().out)
    print(json.dumps(figures, indent=1))
    print((tmp_path/"out"/"eval.json").read_text())
