"""The Self-Draft paper's figures, on the tiny target."""

import json

import pytest

from drafttrain.data.config import Source
from drafttrain.self_draft.build import NgramConfig, build_ngrams
from studies.self_draft import code, figure1, figure8, figures5_to_7
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
