"""`python -m studies.figures`: the command line with stubbed measurements, the promised names and goals."""

import importlib
import json

import pytest

from studies.goals import Group


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script as a module, in an empty folder."""
    module = importlib.import_module("studies.figures.__main__")
    monkeypatch.chdir(tmp_path)
    return module


def stub(script, monkeypatch, **values) -> list:
    """Replaces the topic by one group per figure, with goal ">= 2"; returns the runs that come in."""
    runs: list = []

    def measure(name):
        return lambda run: runs.append((name, run)) or {name: {"value": values[name], "note": "n"}}

    monkeypatch.setitem(script.TOPICS, "main", [Group({name: ">= 2"}, measure(name)) for name in values])
    return runs


def test_names_and_goals(script):
    goals = {name: goal for group in script.TOPICS["main"] for name, goal in group.goals.items()}
    assert goals == {
        "quickstart_wall_s": "<= 1500",
        "quickstart_speedup_ar": ">= 1.15",
        "quickstart_speedup_transformers": ">= 1.15",
        "quickstart_accept_len": ">= 1.8",
        "scratch_accept_len": ">= 1.15",
        "fp32_mismatches": "== 0",
        "train_ratio": ">= 0.70",
        "offline_ratio": ">= 2.5",
        "peak_rss_gb": "<= 6",
    }


def test_prints_json_and_exits_0_when_all_is_well(script, monkeypatch, capsys):
    stub(script, monkeypatch, a=2.5, b=3)
    assert script.main(["main"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == {"figure": "a", "value": 2.5, "goal": ">= 2", "ok": True, "note": "n"}
    assert second["figure"] == "b"


@pytest.mark.parametrize("value", [1.99, None])
def test_exits_1_when_a_figure_falls_short_or_is_missing(script, monkeypatch, capsys, value):
    stub(script, monkeypatch, a=value, b=3)
    assert script.main(["main"]) == 1
    assert [json.loads(line)["ok"] for line in capsys.readouterr().out.splitlines()] == [False, True]


def test_options_reach_the_measurements(script, monkeypatch, capsys):
    runs = stub(script, monkeypatch, a=2, b=2, c=2)
    options = ["--quick", "--resume", "--busy", "warn", "--only", "a", "--only", "c"]
    assert script.main(["main", *options]) == 0
    assert [name for name, _ in runs] == ["a", "c"]
    run = runs[0][1]
    assert (run.topic, run.quick, run.resume, run.busy) == ("main", True, True, "warn")


@pytest.mark.parametrize("words", [["main", "--only", "nothing"], ["other"], []])
def test_wrong_words_are_refused(script, monkeypatch, capsys, words):
    stub(script, monkeypatch, a=2)
    with pytest.raises(SystemExit) as exit:
        script.main(words)
    assert exit.value.code == 2 and not capsys.readouterr().out
