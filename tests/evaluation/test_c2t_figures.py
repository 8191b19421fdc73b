"""The measurements behind `scripts/figures.py c2t`, run on the tiny target with few settings."""

import importlib
import json
import shutil
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from drafttrain.calibration import stage
from drafttrain.classifier.model import Classifier
from drafttrain.evaluation import figures
from drafttrain.evaluation.figures import Run

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def topic(tmp_path, monkeypatch, tiny_bundle, questions):
    """The module over the tiny bundle, with a classifier that follows joint probability."""
    monkeypatch.syspath_prepend(SCRIPTS)
    module = importlib.import_module("figures_c2t")
    monkeypatch.chdir(tmp_path)
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    model = Classifier(hidden=1)
    with torch.no_grad():
        model.inner.weight.copy_(torch.tensor([[8.0, 0.0, 0.0]]))
        model.inner.bias.zero_()
        model.outer.weight.fill_(1.0)
        model.outer.bias.fill_(-3.0)
    model.save(bundle, {})
    held_out = tmp_path / "held_out.jsonl"
    names = ("gsm8k-0", "gsm8k-1", "self-2")
    held_out.write_text("".join(json.dumps({"id": n, "prompt": f"Question {n}: why?"}) + "\n" for n in names))
    monkeypatch.setattr(module, "DRAFTER", bundle)
    monkeypatch.setattr(module, "HELD_OUT", str(held_out))
    monkeypatch.setattr(module, "TUNING", str(questions))
    monkeypatch.setattr(module, "TASKS", {"mt_bench": str(questions)})
    monkeypatch.setattr(module, "NEW_TOKENS", 12)
    for where in (figures, stage):
        monkeypatch.setattr(where, "check_quiet", lambda refuse: None)
    return module


def test_sweeps_compare_families_on_all_tasks(topic, monkeypatch, questions):
    monkeypatch.setattr(topic, "EAGLE2", ["eagle2:top_k=3,max_depth=2,total=2", "eagle2:total=20"])
    monkeypatch.setattr(topic, "JOINT", ["joint:threshold=0.2,max_depth=2", "joint:threshold=0.001"])
    monkeypatch.setattr(topic, "C2T", ["c2t:beta=0.2,max_depth=2", "c2t:beta=0.048,max_depth=3"])
    found = topic.swept(Run("c2t", limit=3, more_prompts={"more": str(questions)}))
    assert found.keys() == {"verify_tokens_vs_eagle2", "verify_tokens_vs_p_threshold"}
    for figure in found.values():
        assert set(figure["tasks"]) == {"mt_bench", "more"}
        common = [task for task in figure["tasks"].values() if task]
        assert (figure["value"] is None) == (len(common) < 2)
    points = Path("runs/figures/full/c2t_sweep/mt_bench/points.jsonl").read_text().splitlines()
    assert len(points) == 6


def test_mean_over_tasks(topic):
    found = topic.mean_over_tasks({"a": {"mean": 0.5}, "b": {"mean": 0.9}})
    assert found["value"] == pytest.approx(0.7) and found["worst"] == 0.9
    missing = topic.mean_over_tasks({"a": {"mean": 0.5}, "b": None})
    assert missing["value"] is None and "common on b" in missing["error"]


def test_chains_are_compared_at_nine(topic):
    found = topic.chains(Run("c2t", limit=2))
    assert found.keys() == {"chain_verify_tokens_vs_fixed9", "chain_vs_dyjoint", "chain_vs_dymax"}
    nine = found["chain_verify_tokens_vs_fixed9"]
    assert nine["accept_len"] >= 1 and len(nine["range"]) == 2


def test_trees_are_dumped_and_learned_from(topic, tmp_path):
    """A dump, a classifier by the command line, and one of another task and of another drafter."""
    measured = topic.dumped(Run("c2t", quick=True))["dump_trees_per_s"]
    assert measured["value"] > 0 and measured["rows"] == measured["trees"] * measured["nodes"] > 0
    trees = shutil.copytree("runs/figures/quick/c2t_trees", "runs/figures/full/c2t_trees")
    [shard] = Path(trees).glob("*.parquet")  # a random drafter is never right, so say that it was
    table = pq.read_table(shard)
    likely = pc.greater(table["P"], pc.quantile(table["P"], 0.99)[0])
    pq.write_table(table.set_column(table.schema.get_field_index("accepted"), "accepted", likely), shard)
    assert topic.classifier(Run("c2t")) == topic.DRAFTER
    found = topic.trained(Run("c2t"))
    assert found["train_9m_rows_s"]["value"] > 0 and not found["train_9m_rows_s"]["ok"]
    assert found["train_9m_rows_gb"]["value"] > 0.1
    assert topic.classifier(Run("c2t")) == Path("runs/figures/full/c2t_classifier")
    assert topic.classifier(Run("c2t", quick=True)) == topic.DRAFTER


def test_losses_of_foreign_classifiers(topic, monkeypatch):
    """The classifier that is always the same loses nothing, wherever it learned."""
    monkeypatch.setattr(topic, "earlier_drafter", lambda folder: topic.DRAFTER)
    monkeypatch.setattr(topic, "C2T", ["c2t:beta=0.2,max_depth=1", "c2t:beta=0.05,max_depth=1"])
    monkeypatch.setattr(topic, "dump_trees", lambda *args: None)

    def train(config, trees, out, baselines):
        Classifier.load(topic.DRAFTER).save(out, {})

    monkeypatch.setattr(topic, "train_classifier", train)
    found = topic.transferred(Run("c2t", limit=2))["transfer_loss"]
    assert found["value"] == pytest.approx(0) and len(found["losses"]) == 2


def test_time_of_the_classifier_is_part_of_drafting(topic, monkeypatch):
    found = topic.draft_time(Run("c2t", limit=2))["draft_time_added"]
    assert 0 < found["value"] < 1 and found["value"] == max(found["shares"].values())


def test_threshold_of_this_machine_against_pct(topic, monkeypatch):
    monkeypatch.setattr(topic, "GRIDS", {"pct": ["pct:width=2,max_depth=2"]})
    found = topic.auto_beta(Run("c2t", quick=True))["auto_beta_vs_pct"]
    assert found["value"] > 0 and found["beta"] in stage.BETAS and found["pct"].startswith("pct:")
