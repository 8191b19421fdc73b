"""The classifier stage of a recipe: what it writes, and that an interrupted one continues."""

import json

import pytest

from drafttrain.classifier.model import Classifier
from drafttrain.classifier.stage_config import ClassifierStageConfig
from drafttrain.data.config import PromptSet
from drafttrain.run import c2t as stage
from drafttrain.run.c2t import make_classifier
from drafttrain.utils.errors import UserError


@pytest.fixture
def config(questions) -> ClassifierStageConfig:
    prompts = PromptSet("prompts", str(questions), 2)
    return ClassifierStageConfig(
        prompts, 200, top_k=120, max_depth=1, features=["P", "d"], hidden=3, epochs=1, batch_size=64
    )


def test_trees_and_classifier(config, tiny_bundle, tmp_path, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(stage, "train_classifier", interrupted)
        make_classifier(config, tiny_bundle, tmp_path / "out", dtype="float32")
    shard = tmp_path / "out" / "trees" / "shard-00000.parquet"
    written = shard.stat().st_mtime_ns
    found = make_classifier(config, tiny_bundle, tmp_path / "out", dtype="float32")
    assert shard.stat().st_mtime_ns == written
    assert found["nodes"] == 120 * found["trees"] > 0 and 0 <= found["theta"] <= 1
    model = Classifier.load(tmp_path / "out")
    assert (model.features, model.hidden) == (("P", "d"), 3)
    record = json.loads((tmp_path / "out" / "classifier.json").read_text())["training"]
    assert (record["epochs"], record["batch_size"]) == (1, 64)
    for name in ("reliability", "recall"):
        assert (tmp_path / "out" / f"classifier_{name}.png").stat().st_size > 5000


def test_no_prompts(tiny_bundle, tmp_path):
    ClassifierStageConfig().check()  # a recipe that asks for no classifier
    with pytest.raises(UserError, match="classifier.prompts: must be set, got null"):
        make_classifier(ClassifierStageConfig(), tiny_bundle, tmp_path / "out")
