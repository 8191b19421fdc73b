"""The EDD paper's tables and figures about trees, on the tiny target."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from drafttrain.calibration.config import CalibrateConfig
from drafttrain.data.config import PromptSet
from drafttrain.run import calibrate as stage
from drafttrain.run.calibrate import calibrate
from studies.edd import figure6, figure7, table2, table4, trees
from tests.conftest import with_cheap_drafts


@pytest.fixture
def measured(tiny_bundle, questions, tmp_path, monkeypatch):
    """Runs a study of trees over the tiny bundle and four chats; returns the folder it writes to."""
    monkeypatch.setattr(stage, "check_quiet", lambda refuse: None)
    config = CalibrateConfig(prompts=PromptSet("prompts", str(questions)), max_new_tokens=8, rounds=1)
    calibrate(config, tiny_bundle, tmp_path / "calibration", device="cpu")
    with_cheap_drafts(tmp_path / "calibration")
    small = {"VCT": "vct:width=2,depth=2", "PCT": "pct:width=2"}
    for name, tree in small.items():
        monkeypatch.setitem(trees.TREES, name, tree)

    def run(study: ModuleType, *words: str) -> Path:
        places = ["--bundle", str(tiny_bundle), "--calibration", str(tmp_path / "calibration")]
        places += ["--new-tokens", "6", "--out", str(tmp_path / "out")]
        assert study.main([*places, *words]) == 0
        return tmp_path / "out"

    return run


def test_table2(measured, questions, monkeypatch):
    monkeypatch.setattr(table2, "TASKS", {"MT-bench": (str(questions), 2), "other": (str(questions), 1)})
    lines = (measured(table2, "--limit", "2") / "table2.md").read_text().splitlines()
    names = ["VCT", "CAPE", "EAGLE-2", "PCT", "PCT w/o removing leaves", "PCT w/o expected gain"]
    assert [line.split("|")[1].strip() for line in lines[2:8]] == names
    assert all(len(line.split("|")) == 2 + 1 + 5 * 2 for line in lines[:8])
    assert lines[-1].startswith("Answers: MT-bench 4, other 2;")


def test_other_tasks(measured, questions):
    lines = (measured(table2, "--limit", "1", "--tasks", f"mine={questions}") / "table2.md").read_text()
    assert "mine: speedup" in lines and lines.rstrip().endswith("at most 6 tokens.")


def test_figure6(measured, questions):
    out = measured(figure6, "--limit", "2", "--prompts", str(questions))
    found = json.loads((out / "width.json").read_text())
    assert list(found) == [str(n) for n in range(1, 9)] and found["1"]["nodes"] < found["8"]["nodes"]
    assert (out / "width.png").stat().st_size > 5000


def test_figure7(measured, questions):
    out = measured(figure7, "--limit", "2", "--prompts", str(questions))
    assert set(json.loads((out / "categories.json").read_text())) == {"x"}
    raw = [json.loads(line) for line in (out / "categories.jsonl").read_text().splitlines()]
    assert len(raw) == 2 and all(len(row["nodes"]) == len(row["tokens"]) for row in raw)


def test_table4(measured, questions):
    text = (measured(table4, "--prompts", str(questions)) / "sample.md").read_text()
    assert "without drafts (6 tokens in 6 iterations)" in text and "EDD + PCT" in text


def test_mistakes_are_one_line(capsys, tmp_path):
    assert figure6.main(["--bundle", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "no config.json there" in line
    for words in (["--limit", "0"], ["--new-tokens", "few"]):
        with pytest.raises(SystemExit):
            figure6.main(words)
        assert "must be a whole number above 0" in capsys.readouterr().err
