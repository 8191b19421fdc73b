"""The scripts that measure trees and profile decoding, run on the tiny target."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from drafttrain.calibration import stage
from drafttrain.calibration.stage import CalibrateConfig, calibrate
from drafttrain.evaluation.prompts import PromptSet

SCRIPTS = Path(__file__).parents[1] / "scripts"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_script", SCRIPTS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def trees(tiny_bundle, questions, tmp_path, monkeypatch):
    """`main` of scripts/trees.py over the tiny bundle and four chats; returns the folder it writes to."""
    monkeypatch.setattr(stage, "check_quiet", lambda refuse: None)
    config = CalibrateConfig(prompts=PromptSet("prompts", str(questions)), max_new_tokens=8, rounds=1)
    calibrate(config, tiny_bundle, tmp_path / "calibration", device="cpu")
    module = load("trees")
    monkeypatch.setattr(module, "MT_BENCH", str(questions))
    monkeypatch.setattr(module, "TASKS", {"MT-bench": (str(questions), 2), "other": (str(questions), 1)})
    monkeypatch.setattr(module, "TREES", {**module.TREES, "VCT": "vct:width=2,depth=2", "PCT": "pct:width=2"})
    monkeypatch.setattr(module, "NEW_TOKENS", 6)

    def run(what: str) -> Path:
        places = ["--bundle", str(tiny_bundle), "--calibration", str(tmp_path / "calibration")]
        assert module.main([what, *places, "--limit", "2", "--out", str(tmp_path / "out")]) == 0
        return tmp_path / "out"

    return run


def test_table2(trees):
    lines = (trees("table2") / "table2.md").read_text().splitlines()
    names = ["VCT", "CAPE", "EAGLE-2", "PCT", "PCT w/o removing leaves", "PCT w/o expected gain"]
    assert [line.split("|")[1].strip() for line in lines[2:8]] == names
    assert all(len(line.split("|")) == 2 + 1 + 5 * 2 for line in lines[:8])
    assert lines[-1].startswith("Answers: MT-bench 4, other 2;")


def test_width(trees):
    out = trees("width")
    found = json.loads((out / "width.json").read_text())
    assert list(found) == [str(n) for n in range(1, 9)] and found["1"]["nodes"] < found["8"]["nodes"]
    assert (out / "width.png").stat().st_size > 5000


def test_categories(trees):
    out = trees("categories")
    assert set(json.loads((out / "categories.json").read_text())) == {"x"}
    raw = [json.loads(line) for line in (out / "categories.jsonl").read_text().splitlines()]
    assert len(raw) == 2 and all(len(row["nodes"]) == len(row["tokens"]) for row in raw)


def test_sample(trees):
    text = (trees("sample") / "sample.md").read_text()
    assert "without drafts (6 tokens in 6 iterations)" in text and "EDD + PCT" in text


def test_mistakes_are_one_line(capsys, tmp_path):
    assert load("trees").main(["width", "--bundle", str(tmp_path), "--out", str(tmp_path / "out")]) == 2
    assert load("profile_decode").main(["--bundle", str(tmp_path)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all("no config.json there" in line for line in lines)


def test_profile(tiny_bundle, questions, capsys):
    words = ["--bundle", str(tiny_bundle), "--prompts", str(questions), "--tokens", "6", "--rows", "3"]
    assert load("profile_decode").main(words) == 0
    printed = capsys.readouterr().out
    assert "ms per step:" in printed and "tree policy" in printed and "aten::" in printed
