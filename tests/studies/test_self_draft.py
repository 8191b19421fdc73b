"""The Self-Draft paper's figures, on the tiny target."""

import json

import pytest

from drafttrain.data.config import Source
from drafttrain.self_draft.build import NgramConfig, build_ngrams
from studies.self_draft import code, figure1, figure8, figures5_to_7, joins
from tests.conftest import SENTENCES

STUDIES = {"ablation": figure8, "branches": figures5_to_7, "noise": figure1, "code": code}


@pytest.mark.parametrize("study", STUDIES)
def test_studies(study, tiny_target_folder, tiny_llama, tmp_path, monkeypatch, capsys):
    module = STUDIES[study]
    (tmp_path / "text.txt").write_text("\n\n".join(SENTENCES * 2))
    config = NgramConfig([Source(str(tmp_path / "text.txt"))], processes=1, held_out=0.0)
    build_ngrams(config, tiny_llama[1], tmp_path / "ngrams")
    rows = [{"question_id": i, "category": "ab"[i % 2], "turns": [f"Question {i}?"]} for i in range(4)]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(figures5_to_7, "SIZES", (2, 3))
    monkeypatch.setattr(figure1, "NOISE", (1, 2))
    places = ["--target", str(tiny_target_folder), "--ngrams", str(tmp_path / "ngrams"), "--dtype", "float32"]
    places += ["--tasks", f"one={questions}"] if study == "code" else ["--prompts", str(questions)]
    status = module.main([*places, "--limit", "4", "--new-tokens", "6", "--out", str(tmp_path / "out")])
    if study == "noise" and status:
        assert "pip install sacrebleu rouge-score" in capsys.readouterr().err
        return
    found = json.loads((tmp_path / "out" / f"{study}.json").read_text())
    wanted = {"ablation": figure8.ABLATIONS, "branches": ["2x2", "2x3", "3x2", "3x3"], "noise": ["1", "2"]}
    wanted["code"] = ["one"]
    assert list(found) == list(wanted[study])
    if study == "ablation":
        assert all(row["accept_len"] >= 1 and set(row["categories"]) == {"a", "b"} for row in found.values())
    if study == "noise":
        assert all(0 <= score <= 1 for row in found.values() for score in row.values())


def test_ways_to_join(tiny_bundle, tmp_path, monkeypatch):
    monkeypatch.setattr(joins, "POLICIES", ("chain:length=2",))
    monkeypatch.setattr(joins, "REPEATS", 1)
    rows = [{"id": str(i), "prompt": f"Question {i}?"} for i in range(3)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    places = ["--bundle", str(tiny_bundle), "--prompts", str(prompts), "--dtype", "float32"]
    assert joins.main([*places, "--limit", "2", "--new-tokens", "6", "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out" / "joins_summary.json").read_text())["rows"]
    ways = [f"ngram+chain:length=2, sure {sure}, least {least}" for sure in "12" for least in (0.1, 0.2)]
    assert {"ngram", "chain:length=2", *ways} < found.keys()
    assert all(row["accept_len"] >= 1 and row["speedup"] > 0 for row in found.values())
