"""The measurements of topic trees, run on the tiny target."""

import importlib
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from drafttrain.calibration import timing
from drafttrain.run import calibrate as stage
from drafttrain.utils.errors import UserError
from studies import goals
from studies.goals import Run
from studies.policies import tune


@pytest.fixture(scope="module")
def calibrate_once(tmp_path_factory):
    """The calibration of the first test that asks, in few rounds, copied for the others."""
    known = tmp_path_factory.mktemp("known") / "calibration"

    def calibrate(config, drafter, place, dtype) -> None:
        if not known.exists():
            with pytest.MonkeyPatch.context() as patch:
                # PCT is refused where a drafting step takes longer than a forward, as it may with so small a
                # target
                patch.setattr(timing._Clock, "draft", lambda clock, f, width: 1e-5)
                patch.setattr(timing._Clock, "grow", lambda clock, f, width: None)
                stage.calibrate(replace(config, rounds=5), drafter, known, dtype=dtype)
        shutil.copytree(known, place)

    return calibrate


@pytest.fixture
def script(tmp_path, monkeypatch, tiny_bundle, questions, calibrate_once):
    """The topic's module over the tiny bundle and four chats instead of benchmarks, in an empty folder."""
    module = importlib.import_module("studies.figures.trees")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "QUICKSTART_DRAFTER", tiny_bundle)
    monkeypatch.setattr(module, "PROMPTS", dict.fromkeys(("mt_bench", "gsm8k"), str(questions)))
    monkeypatch.setattr(module, "NEW_TOKENS", 6)
    monkeypatch.setattr(module, "calibrate", calibrate_once)
    monkeypatch.setattr(module, "OTHER_TASKS", {"gsm8k": str(questions)})
    monkeypatch.setattr(module, "TUNING", str(questions))
    monkeypatch.setattr(goals, "check_quiet", lambda refuse: None)
    monkeypatch.setattr(stage, "check_quiet", lambda refuse: None)
    return module


def test_trees_are_tuned_and_compared(script, monkeypatch):
    monkeypatch.setattr(
        script,
        "GRIDS",
        {
            "eagle2": ["eagle2:top_k=2,max_depth=2,total=3"],
            "pct": ["pct:width=2"],
            "pct-tuned": ["pct:width=2,threshold=0.2"],
        },
    )
    grids = {"chain": ["chain:length=1", "chain:length=2"], "timed": ["timed"], **script.GRIDS}
    monkeypatch.setattr(script, "tune", lambda *args: tune(*args, grids=grids))
    measured = script.trees(Run("trees", limit=2))
    assert measured.keys() == script.GROUPS[0].goals.keys()
    assert all(figure["value"] > 0 for figure in measured.values())
    tables = json.loads(Path("runs/figures/limited/trees/tables.json").read_text())
    assert set(tables) == {"mt_bench", "gsm8k"} and tables["mt_bench"]["chain"]["repeats"] == 3
    rows = tables["mt_bench"]
    assert measured["ar_vs_transformers"]["value"] == pytest.approx(
        rows["autoregressive"]["tokens_per_second"] / rows["transformers"]["tokens_per_second"]
    )
    assert measured["best_vs_ar"]["size"] == {"prompts": {"gsm8k": 4, "mt_bench": 2}, "repeats": 3}
    assert 0 < measured["outside_share"]["value"] < 1


def test_vllm_is_asked_for_the_same_prompts(script, tmp_path, monkeypatch):
    """A stand-in for the interpreter with vLLM: it answers three tokens to everything, in half a second."""
    answer = (
        "import json, sys; job = json.load(sys.stdin); n = len(job['prompts']); assert job['stop'];"
        "answer = {'seconds': [[0.5] * n] * job['repeats'], 'outputs': [[1, 2, 3]] * n};"
        "json.dump(answer, open(sys.argv[2], 'w'))"
    )
    (tmp_path / "answer.py").write_text(answer)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {tmp_path}/answer.py "$@"\n')
    python.chmod(0o755)
    assert "skipped" in script.against_vllm(Run("trees"))["best_vs_vllm_ngram"]
    run = Run("trees", limit=2, vllm_python=str(python))
    with pytest.raises(UserError, match="nothing is tuned yet"):
        script.against_vllm(run)
    tuned = {"chosen": {"a": "chain:length=1", "b": "chain:length=2"}, "speeds": {}}
    tuned["speeds"] = {"chain:length=1": 3.0, "chain:length=2": 2.0}
    Path("runs/figures/limited/trees").mkdir(parents=True)
    Path("runs/figures/limited/trees/tuning.json").write_text(json.dumps(tuned))
    drafting = script.drafting

    def steady(*given):
        decode = drafting(*given)

        def at_one_speed(prompt_ids, max_new_tokens):
            found = decode(prompt_ids, max_new_tokens)
            return replace(found, seconds=len(found.token_ids) / 12.0)

        return at_one_speed

    monkeypatch.setattr(script, "drafting", steady)
    found = script.against_vllm(run)["best_vs_vllm_ngram"]
    assert found["tree"] == "chain:length=1" and found["vllm"] == [6.0] * 3
    own = found["before"] + found["after"]
    assert own == pytest.approx([12.0] * 4) and found["value"] == pytest.approx(2.0)
    assert found["interval"] == pytest.approx([2.0, 2.0])
    assert found["size"] == {"prompts": {"mt_bench": 2}, "repeats": 3}


def test_large_trees_are_counted(script, monkeypatch):
    trees = {
        "EAGLE-2 (50 nodes)": "eagle2:top_k=3,max_depth=2,total=8",
        "PCT (published)": "pct:width=2,threshold=0.9",
        "PCT tuned (large)": "pct:width=2,threshold=0.5",
    }
    monkeypatch.setattr(script, "LARGE", trees)
    found = script.large_trees(Run("trees", limit=3))
    length, verified = found["pct_accept_len_vs_eagle2"], found["pct_verify_tokens_vs_eagle2"]
    assert length["size"]["prompts"] == {"mt_bench": 3} and length["value"] == pytest.approx(
        length["accept_len"]["PCT (published)"] / length["accept_len"]["EAGLE-2 (50 nodes)"]
    )
    assert 0 < verified["value"] < 0.5  # two nodes against eight
    assert found["pct_tuned_accept_len_vs_eagle2"]["tree"] == trees["PCT tuned (large)"]


def test_batches(script, monkeypatch):
    assert script.batches(Run("trees", quick=True))["batch4_vs_batched_ar"]["value"] > 0
    monkeypatch.setattr(script, "GRIDS", {"chain": ["chain:length=2"]})
    figure = script.batch_exactness(Run("trees", quick=True))["batch_mismatches"]
    assert figure.pop("ok") is None and "quick run" in figure.pop("why")
    assert figure == {"value": 0, "policies": ["autoregressive", "chain:length=2"], "rows": 16}
