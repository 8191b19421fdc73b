"""The figures of topic `self-draft` over a tiny bundle with a cache."""

import importlib
import json
import shutil

import pytest

from drafttrain.calibration.config import CalibrateConfig
from drafttrain.data.config import PromptSet, Source
from drafttrain.run.calibrate import calibrate
from drafttrain.self_draft import tuning as self_draft
from drafttrain.self_draft.build import build_ngrams
from drafttrain.self_draft.config import NgramConfig
from studies import goals as figures
from studies.goals import Run
from tests.conftest import SENTENCES


@pytest.fixture
def topic(tmp_path, monkeypatch, tiny_bundle, tiny_llama, questions):
    module = importlib.import_module("studies.figures.self_draft")
    monkeypatch.chdir(tmp_path)
    bundle = shutil.copytree(tiny_bundle, tmp_path / "bundle")
    (tmp_path / "text.txt").write_text("\n\n".join(SENTENCES * 2))
    config = NgramConfig([Source(str(tmp_path / "text.txt"))], processes=1, held_out=0.0)
    build_ngrams(config, tiny_llama[1], tmp_path / "cache")
    for file in (tmp_path / "cache").iterdir():
        shutil.copy(file, bundle)
    rows = questions.read_text().splitlines()
    mt_bench = tmp_path / "mt_bench.jsonl"
    mt_bench.write_text(
        "".join(f'{{"question_id": {i}, "category": "c{i % 2}", "turns": ["Why {i}?"]}}\n' for i in range(3))
    )
    assert rows
    monkeypatch.setattr(module, "BUNDLE", bundle)
    monkeypatch.setattr(module, "TUNING", str(questions))
    monkeypatch.setattr(module, "MT_BENCH", str(mt_bench))
    monkeypatch.setattr(
        module, "TASKS", {**dict.fromkeys(module.TASKS, str(questions)), "mt_bench": str(mt_bench)}
    )
    monkeypatch.setattr(module, "NEW_TOKENS", 10)
    monkeypatch.setattr(module, "EDD_TREES", ("chain:length=2",))
    for where in (figures, self_draft):
        monkeypatch.setattr(where, "check_quiet", lambda refuse: None)
    prompts = PromptSet("prompts", str(questions), 2)
    monkeypatch.setattr("drafttrain.run.calibrate.check_quiet", lambda refuse: None)
    calibrate(CalibrateConfig(prompts=prompts, max_new_tokens=6, rounds=1), bundle, bundle, device="cpu")
    return module


def test_speeds(topic):
    found = topic.speeds(Run("self-draft", quick=True))
    names = {"accept_len_vs_lookup", "speed_vs_ar", "speed_vs_transformers_lookup"}
    assert set(found) == names | {f"ngram_{name}" for name in names} | {"edd_ngram_vs_edd"}
    assert set(found) == set(topic.GROUPS[0].goals)
    for figure in found.values():
        assert figure["value"] > 0 and set(figure["tasks"]) == set(topic.TASKS)
        assert set(figure["size"]["prompts"]) == set(topic.TASKS) and figure["size"]["repeats"] == 1
    beside = found["edd_ngram_vs_edd"]
    assert beside["value"] == pytest.approx(min(beside["tasks"].values()), abs=1e-3)
    low, high = found["ngram_speed_vs_ar"]["interval"]
    assert low <= found["ngram_speed_vs_ar"]["value"] <= high
    report = topic.Path("runs/figures/quick/self_draft/report.json").read_text()
    report = json.loads(report)
    assert set(report["mt_bench_categories"]) <= {"c0", "c1"} and report["mt_bench_categories"]


def test_counts_and_cache(topic):
    found = topic.counts(Run("self-draft", quick=True))
    gains = sorted(found["branches_gain"]["tasks"].values())
    assert found["branches_gain"]["value"] == gains[-3] and found["vs_lookahead"]["value"] > 0
    low, high = found["vs_lookahead"]["interval"]
    assert low <= found["vs_lookahead"]["value"] + 1e-3 and found["vs_lookahead"]["value"] <= high + 1e-3
    report = json.loads(topic.Path("runs/figures/quick/self_draft_counts/report.json").read_text())
    for rows in report.values():
        assert rows["lookahead"]["accepted_by_source"] is None
        assert set(rows["no branches"]["accepted_by_source"]) <= {"corpus"}
    cache = topic.cache(Run("self-draft", quick=True))
    assert cache["lookup_us"]["lookups"] > 0 and all(figure["value"] > 0 for figure in cache.values())


@pytest.mark.parametrize("ends", [[0.9, 1.3], None])
def test_one_prompt_of_a_task_gives_no_interval(ends):
    topic = importlib.import_module("studies.figures.self_draft")
    found = {"tasks": {"a": 1.5, "b": 1.0}, "intervals": {"a": [1.1, 1.9], "b": ends}}
    assert topic.mean(found)["value"] == 1.25 and topic.worst(found)["value"] == 1.0
    assert topic.mean(found)["interval"] == (ends and pytest.approx([1.0, 1.6]))
    assert topic.worst(found)["interval"] == ends


def test_oanc_is_asked_for(topic):
    found = topic.oanc(Run("self-draft"))
    assert found["oanc_build_s"]["value"] is None and "--oanc" in found["oanc_build_s"]["skipped"]
