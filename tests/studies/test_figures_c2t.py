"""The measurements of topic c2t, run on the tiny target with few settings."""

import importlib
import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from drafttrain.calibration import timing
from drafttrain.classifier.model import Classifier
from drafttrain.evaluation.sweep import Point
from drafttrain.run import calibrate as stage
from drafttrain.utils.errors import UserError
from studies import goals as figures
from studies.goals import Run


@pytest.fixture
def topic(tmp_path, monkeypatch, tiny_bundle, questions):
    """The module over the tiny bundle, with a classifier that follows joint probability."""
    module = importlib.import_module("studies.figures.c2t")
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


def point(tree: str, accept_len: float, verified: float) -> Point:
    return Point(tree, accept_len, verified, int(100 * verified), 100, 100, accept_len, 0.0, 1.0)


def line(family: str, slope: float, lowest: float = 1.5) -> list[Point]:
    """Two points of a family that verifies `slope` tokens for each token it wins."""
    return [point(f"{family}:x={x}", x, slope * (x - 1)) for x in (lowest, 3.0)]


def test_sweeps_compare_families_on_all_tasks(topic, monkeypatch, questions):
    """C2T verifies half of what EAGLE-2 does and two thirds of what the threshold does, at any accept_len."""
    asked = []

    def sweep(bundle, prompts, trees, out, reference, tokens, target, classifier, rows):
        asked.append((prompts.name, len(Path(prompts.path).read_text().splitlines()), Path(classifier)))
        return [*line("eagle2", 6), *line("joint", 4.5), *line("c2t", 3)], []

    monkeypatch.setattr(topic, "sweep", sweep)
    found = topic.swept(Run("c2t", limit=3, more_prompts={"more": str(questions)}))
    assert asked == [(name, 3, topic.DRAFTER) for name in ("mt_bench", "more")]
    assert found["verify_tokens_vs_eagle2"]["value"] == pytest.approx(1 / 2)
    assert found["verify_tokens_vs_p_threshold"]["value"] == pytest.approx(2 / 3)
    for figure in found.values():
        assert set(figure["tasks"]) == {"mt_bench", "more"} and len(figure["weights"]) == 16


def test_a_sweep_for_real(topic, monkeypatch):
    monkeypatch.setattr(topic, "EAGLE2", ["eagle2:top_k=3,max_depth=2,total=2", "eagle2:total=20"])
    monkeypatch.setattr(topic, "JOINT", ["joint:threshold=0.2,max_depth=2", "joint:threshold=0.001"])
    monkeypatch.setattr(topic, "C2T", ["c2t:beta=0.2,max_depth=2", "c2t:beta=0.048,max_depth=3"])
    assert topic.swept(Run("c2t", limit=3)).keys() == topic.GROUPS[2].goals.keys()
    points = Path("runs/figures/limited/c2t_sweep/mt_bench/points.jsonl").read_text().splitlines()
    assert len(points) == 6


def test_no_classifier_is_an_error_of_one_line(topic):
    (topic.DRAFTER / "classifier.safetensors").unlink()
    with pytest.raises(UserError, match="no classifier; make one with python -m studies.figures c2t"):
        topic.chains(Run("c2t", limit=2))


def test_mean_over_tasks(topic):
    found = topic.mean_over_tasks({"a": {"mean": 0.5}, "b": {"mean": 0.9}})
    assert found["value"] == pytest.approx(0.7) and found["worst"] == 0.9
    assert "interval" not in found
    tasks, drawn = {"a": {"mean": 0.5}, "b": {"mean": 0.9}}, np.linspace(0.4, 0.6, 1000)
    of_both = topic.mean_over_tasks(tasks, [drawn, drawn + 0.4])["interval"]
    # the mean of two that vary apart varies less than either
    assert 0.62 < of_both[0] < 0.64 and 0.76 < of_both[1] < 0.78
    assert "interval" not in topic.mean_over_tasks(tasks, [drawn])
    missing = topic.mean_over_tasks({"a": {"mean": 0.5}, "b": None})
    assert missing["value"] is None and "common on b" in missing["error"]


def test_chains_are_compared_at_nine(topic):
    """At accept_len 2 a fixed chain of 9 verifies 9 tokens and C2T, halfway between its points, 4."""
    fixed = [point("chain:length=9", 2.0, 9.0), point("chain:length=5", 1.9, 5.0)]
    chains = [*line("c2t_chain", 4), *line("dyjoint", 5), *line("dymax", 8)]
    found = topic.chain_figures([*fixed, *chains])
    assert found["chain_verify_tokens_vs_fixed9"]["value"] == pytest.approx(4 / 9)
    assert found["chain_vs_dyjoint"]["value"] == pytest.approx(4 / 5)
    assert found["chain_vs_dymax"]["value"] == pytest.approx(4 / 8)
    short = topic.chain_figures([*fixed, *line("c2t_chain", 4, 2.5), *line("dyjoint", 5)])
    assert short["chain_verify_tokens_vs_fixed9"]["value"] is None
    assert "not among those of C2T" in short["chain_verify_tokens_vs_fixed9"]["error"]
    assert short["chain_vs_dymax"]["value"] is None


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
    """The classifier of the other task verifies a tenth more, that of the other drafter a fifth."""
    trained_on = {}

    def dump(config, bundle, out):
        trained_on[out.parent.name] = (config.prompts.path, bundle)

    def sweep(bundle, prompts, trees, out, reference, tokens, classifier, rows):
        return line("c2t", {"own": 4, "foreign0": 4.4, "foreign1": 4.8}.get(out.parent.name, 4)), []

    monkeypatch.setattr(topic, "earlier_drafter", lambda folder: Path("earlier"))
    monkeypatch.setattr(topic, "dump_trees", dump)
    monkeypatch.setattr(topic, "train_classifier", lambda *args, **options: None)
    monkeypatch.setattr(topic, "sweep", sweep)
    found = topic.transferred(Run("c2t", limit=2))["transfer_loss"]
    assert found["losses"] == pytest.approx({"another task": 0.1, "another drafter": 0.2})
    assert found["value"] == pytest.approx(0.2)
    assert trained_on["foreign1"] == (topic.HELD_OUT, Path("earlier"))
    lines = Path(trained_on["foreign0"][0]).read_text().splitlines()
    assert [json.loads(row)["id"] for row in lines] == ["gsm8k-0", "gsm8k-1"]


def test_time_of_the_classifier_is_part_of_drafting(topic, monkeypatch):
    found = topic.draft_time(Run("c2t", limit=2))["draft_time_added"]
    assert 0 < found["value"] < 1 and found["value"] == max(found["shares"].values())


def test_threshold_of_this_machine_against_pct(topic, monkeypatch):
    # PCT is refused where a drafting step takes longer than a forward, as it may with so small a target
    monkeypatch.setattr(timing._Clock, "draft", lambda clock, f, width: 1e-5)
    monkeypatch.setattr(timing._Clock, "grow", lambda clock, f, width: None)
    monkeypatch.setattr(topic, "GRIDS", {"pct": ["pct:width=2,max_depth=2"], "pct-tuned": []})
    found = topic.auto_beta(Run("c2t", quick=True))["auto_beta_vs_pct"]
    assert found["value"] > 0 and 0 < found["beta"] < 1 and found["pct"].startswith("pct:")
