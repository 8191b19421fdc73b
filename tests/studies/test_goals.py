"""Judging, printing and recording figures, and watching the memory of a process tree."""

import json
import os
import sys
from dataclasses import replace

import pytest
import torch

from drafttrain.evaluation.metrics import Measurement
from drafttrain.kernels.machine import describe_machine
from drafttrain.utils.errors import UserError
from studies import goals as figures
from studies.goals import (
    Group,
    Run,
    Size,
    judge,
    measure_topic,
    reaches,
    recorded,
    rounded,
    run_and_watch,
    size_of,
)


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def group(value, goal=">= 2", name="f", long=False, **notes) -> Group:
    return Group({name: goal}, lambda run: {name: {"value": value, **notes}}, long)


def rows(capsys) -> list[dict]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    "goal, value, ok",
    [
        (">= 1.15", 1.15, True),
        (">= 1.15", 1.1499, False),
        ("<= 1500", 1500, True),
        ("<= 1500", 1500.1, False),
        ("== 0", 0, True),
        ("== 0", 1, False),
        (">= 1", None, False),
        (">= 1", float("nan"), False),
    ],
)
def test_goals(goal, value, ok):
    assert reaches(goal, value) is ok
    assert judge(goal, {"value": value}, Size())[0] is ok


@pytest.mark.parametrize(
    "goal, measured, ok, why",
    [
        ("> 1", {"value": 1.2, "interval": [1.01, 1.4]}, True, None),
        ("> 1", {"value": 1.2, "interval": [1.0, 1.4]}, False, "the interval begins at 1"),
        ("> 1", {"value": 1.2}, None, "no interval"),
        (">= 1.0", {"value": 1.2, "interval": [1.0, 1.4]}, True, None),
        (">= 1.5", {"value": 1.6, "interval": [0.98, 1.9]}, False, "the interval begins at 0.98"),
        (">= 1.5", {"value": 1.6, "interval": [1.2, 1.9]}, True, None),
        (">= 1.5", {"value": 1.4, "interval": [1.2, 1.9]}, False, "the goal is missed"),
        (">= 0.97", {"value": 0.98, "interval": [0.9, 1.1]}, True, None),
        ("<= 0.9", {"value": 0.8, "interval": [0.7, 0.95]}, True, None),
        (">= 2", {"value": 3, "flags": ["noisy", "busy"]}, None, "noisy; busy"),
        (">= 2", {"value": 1, "flags": ["noisy"]}, False, "the goal is missed"),
        (">= 2", {"value": 3, "ok": False}, False, "a condition of its own is not met"),
        (">= 2", {"value": 3, "ok": None, "why": "other definition"}, None, "other definition"),
        (">= 2", {"value": None, "skipped": "no vLLM"}, None, "no vLLM"),
    ],
)
def test_judge(goal, measured, ok, why):
    assert judge(goal, measured, Size()) == (ok, why)


@pytest.mark.parametrize(
    "size, ok, why",
    [
        ({"prompts": {"a": 80, "b": 20}, "repeats": 3, "seeds": 3}, True, None),
        ({"prompts": {"a": 80, "b": 30, "c": 1}, "repeats": 5, "seeds": 4}, True, None),
        ({"prompts": {"a": 79, "b": 20}, "repeats": 3, "seeds": 3}, None, "79 of 80 prompts of a"),
        ({"prompts": {"a": 80}, "repeats": 3, "seeds": 3}, None, "0 of 20 prompts of b"),
        ({"prompts": {"a": 80, "b": 20}, "seeds": 3}, None, "1 of 3 repeats"),
        ({"prompts": {"a": 80, "b": 20}, "repeats": 2, "seeds": 1}, None, "2 of 3 repeats, 1 of 3 seeds"),
    ],
)
def test_what_was_measured_on_too_little_is_undecided(size, ok, why):
    asked = Size({"a": 80, "b": 20}, repeats=3, seeds=3)
    found = judge(">= 2", {"value": 2, "size": size}, asked)
    assert found == (ok, why and f"measured on {why}")
    missed = "the goal is missed"
    expected = (None, f"measured on {why}; {missed}") if why else (False, missed)
    assert judge(">= 2", {"value": 1, "size": size}, asked) == expected


def test_an_undecided_figure_that_misses_its_goal_falls_short(capsys):
    asked = Size({"a": 80})
    small = {"size": {"prompts": {"a": 4}}}
    for value, well in ((2, True), (1, False)):
        one = Group({"f": ">= 2"}, lambda run, value=value: {"f": {"value": value, **small}}, size=asked)
        assert measure_topic([one], Run("t")) is well
        [row] = rows(capsys)
        assert row["ok"] is None and row["why"].startswith("measured on 4 of 80 prompts of a")


def test_size_is_counted_in_prompts():
    measured = [
        Measurement(task, prompt, turn, repeat, 5, {})
        for repeat in range(3)
        for task, prompt, turn in (("a", "1", 0), ("a", "1", 1), ("a", "2", 0), ("b", "1", 0))
    ]
    assert size_of(measured) == {"prompts": {"a": 2, "b": 1}, "repeats": 3}


def test_one_line_per_figure(capsys):
    two = Group({"a": ">= 1", "b": "<= 1"}, lambda run: {"b": {"value": 2}, "a": {"value": 1.23456, "n": 3}})
    assert measure_topic([two], Run("t")) is False
    assert rows(capsys) == [
        {"figure": "a", "value": 1.2346, "goal": ">= 1", "ok": True, "n": 3},
        {"figure": "b", "value": 2, "goal": "<= 1", "ok": False, "why": "the goal is missed"},
    ]


def test_all_well(capsys):
    assert measure_topic([group(2), group(3, name="g")], Run("t")) is True
    assert [row["ok"] for row in rows(capsys)] == [True, True]


def test_a_measurement_may_overrule_its_goal(capsys):
    assert measure_topic([group(5, ok=False)], Run("t")) is False
    assert rows(capsys)[0]["ok"] is False
    assert measure_topic([group(1, ok=True)], Run("t")) is False


def test_what_a_measurement_prints_goes_to_standard_error(capsys):
    def chatty(run):
        print("table")
        return {"f": {"value": 2}}

    measure_topic([Group({"f": ">= 2"}, chatty)], Run("t"))
    out, err = capsys.readouterr()
    assert json.loads(out)["value"] == 2 and err == "table\n"


@pytest.mark.parametrize("error, traced", [(UserError("no such file"), False), (KeyError("x"), True)])
def test_a_failure_does_not_cost_the_other_figures(capsys, error, traced):
    def fails(run):
        raise error

    assert measure_topic([Group({"bad": "== 0"}, fails), group(2)], Run("t")) is False
    out, err = capsys.readouterr()
    bad, good = map(json.loads, out.splitlines())
    assert (bad["value"], bad["ok"]) == (None, False) and bad["error"] in ("no such file", "'x'")
    assert good["ok"] and ("Traceback" in err) is traced


def test_missing_figures_are_not_ok(capsys):
    assert (
        measure_topic([Group({"f": "<= 1", "g": "<= 1"}, lambda run: {"f": {"value": 0}})], Run("t")) is False
    )
    assert rows(capsys)[1] == {
        "figure": "g",
        "value": None,
        "goal": "<= 1",
        "ok": False,
        "error": "not measured",
    }


def test_only_what_is_wanted_is_measured(capsys):
    def forbidden(run):
        raise AssertionError

    both = Group({"a": ">= 1", "b": ">= 1"}, lambda run: {"a": {"value": 1}, "b": {"value": 1}})
    assert measure_topic([Group({"x": ">= 1"}, forbidden), both], Run("t"), only=["b"]) is True
    assert [row["figure"] for row in rows(capsys)] == ["b"]


def test_quick_runs_take_long_figures_from_the_last_full_run(capsys):
    long = group(7, long=True)
    assert measure_topic([long], Run("t", quick=True)) is False
    assert "no full run is recorded" in rows(capsys)[0]["error"]
    measure_topic([long, group(2, name="g")], Run("t"))
    measure_topic([group(9, name="g")], Run("t"))  # replaces its own line only
    capsys.readouterr()
    forbidden = Group({"f": ">= 2"}, None, long=True)
    assert measure_topic([forbidden, group(3, name="g")], Run("t", quick=True)) is True
    first, second = rows(capsys)
    assert first["value"] == 7 and first["recorded"] and second["value"] == 3
    assert {name: row["value"] for name, row in recorded("t").items()} == {
        "f": 7,
        "g": 9,
    }  # quick: not recorded


def test_recorded_shortfalls_stay_shortfalls(capsys):
    measure_topic([group(7, long=True, ok=False)], Run("t"))
    assert measure_topic([group(7, long=True)], Run("t", quick=True)) is False


def test_committed_records_serve_a_fresh_clone(tmp_path, capsys):
    path = tmp_path / "docs/figures/t.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text('{"figure": "f", "value": 4, "ok": true, "measured": "2025"}\n')
    assert measure_topic([group(0, long=True)], Run("t", quick=True)) is True
    assert rows(capsys)[0]["recorded"] == "2025"
    measure_topic([group(5, long=True)], Run("t"))  # this clone's own run counts more
    capsys.readouterr()
    measure_topic([group(0, long=True)], Run("t", quick=True))
    assert rows(capsys)[0]["value"] == 5


def test_history_is_quoted_and_never_ok(tmp_path, capsys):
    path = tmp_path / "docs/figures/history/t.jsonl"
    path.parent.mkdir(parents=True)
    path.write_text('{"figure": "f", "value": 4, "ok": null, "why": "another definition"}\n')
    measure_topic([group(0, long=True)], Run("t", quick=True))
    [row] = rows(capsys)
    assert (row["value"], row["ok"], row["why"]) == (4, None, "another definition")
    (tmp_path / "docs/figures/t.jsonl").write_text('{"figure": "f", "value": 3, "ok": true}\n')
    measure_topic([group(0, long=True)], Run("t", quick=True))
    assert rows(capsys)[0]["value"] == 3


def test_the_newest_record_counts(tmp_path):
    """This clone's or the committed one; earlier definitions only where there is neither."""

    def write(folder: str, **rows: str) -> None:
        path = tmp_path / folder / "t.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        values = [{"figure": name, "value": folder, "measured": at} for name, at in rows.items()]
        path.write_text("".join(json.dumps(row) + "\n" for row in values))

    noon, later = "2026-11-01T12:00:00+0000", "2026-11-01T12:30:00-0100"  # 13:30 UTC
    write("docs/figures", a=noon, b=later, c=noon, d=noon)
    write("runs/figures", a=later, b="2026-11-01T13:00:00+0000", c=noon)
    write("docs/figures/history", d=later, e=noon)
    found = {name: row["value"] for name, row in recorded("t").items()}
    runs, docs, history = "runs/figures", "docs/figures", "docs/figures/history"
    assert found == {"a": runs, "b": docs, "c": runs, "d": docs, "e": history}


def test_recorded_rows_name_the_machine(monkeypatch):
    class Load:
        def lap(self):
            return 0.123456

    monkeypatch.setattr(figures, "OtherLoad", Load)
    there = {"processor": "P", "kernel": None, "dtype": "float32"}  # measured in a process set up differently
    measure_topic([group(5), group(6, name="g", machine=there)], Run("t"))
    here = {**describe_machine(torch.device("cpu")), "load": 0.1235}
    assert recorded("t")["f"]["machine"] == here
    assert recorded("t")["g"]["machine"] == {**here, **there}


def test_failures_are_not_recorded():
    """Exceptions leave the record alone; a figure without a value, as where two curves have
    nothing in common, is one that is missed."""

    def fail(run):
        raise UserError("busy")

    measure_topic([group(5)], Run("t"))
    measure_topic([replace(group(5), measure=fail)], Run("t"))
    assert recorded("t")["f"]["value"] == 5
    measure_topic([group(None)], Run("t"))
    assert recorded("t")["f"]["value"] is None and recorded("t")["f"]["ok"] is False


def test_a_folder_begun_with_other_settings_is_not_gone_on_with():
    run = Run("t")
    (run.folder("g", pair=["a", "b"]) / "raw.jsonl").write_text("x")
    again = Run("t", resume=True)
    assert (again.folder("g", pair=["a", "b"]) / "raw.jsonl").exists()
    with pytest.raises(UserError, match=r"g: was begun with {'pair': \['a', 'b'\]}, got {'pair': None}"):
        again.folder("g", pair=None)
    assert again.folder_of("g") == run.folder("g", pair=["a", "b"]) and len(again.resumed) == 2


def test_folders_are_emptied_unless_resumed():
    for run, kept in ((Run("t"), False), (Run("t", resume=True), True)):
        (run.folder("g") / "raw.jsonl").write_text("x")
        assert (run.folder("g") / "raw.jsonl").exists() is kept
    assert Run("t", quick=True).folder("g") != Run("t", resume=True).folder("g")


def test_a_shortened_run_replaces_nothing_of_a_full_one(capsys):
    def measure(run):
        (run.folder("raw") / "rows").write_text(str(run.limit))
        return {"f": {"value": run.limit or 80}}

    def value() -> float:
        return recorded("t")["f"]["value"]

    measured = Group({"f": ">= 2"}, measure)
    measure_topic([measured], Run("t", limit=3))
    assert value() == 3  # there is no other
    measure_topic([measured], Run("t"))
    measure_topic([measured], Run("t", limit=4))
    assert value() == 80 and (figures.RAW / "full/raw/rows").read_text() == "None"
    assert (figures.RAW / "limited/raw/rows").read_text() == "4"
    figures.COMMITTED.mkdir(parents=True)
    rows = (figures.RAW / "t.jsonl").read_text()
    (figures.COMMITTED / "t.jsonl").write_text(rows)
    (figures.RAW / "t.jsonl").unlink()
    measure_topic([measured], Run("t", limit=5))
    assert value() == 80  # the committed one is older, and full


def test_raw_data_of_other_figures_are_noted_and_checked():
    run = Run("t")
    made = run.folder_of("g", pair=["a", "b"])
    assert run.resumed == [] and figures.read_json(made / figures.BEGUN)["settings"] == {"pair": ["a", "b"]}
    (made / "raw.jsonl").write_text("x")
    assert (Run("t").folder_of("g") / "raw.jsonl").exists()
    assert not run.folder_of("h").exists()  # others begin it
    with pytest.raises(UserError, match="g: was begun with .*; measure its figures again without --resume"):
        Run("t").folder_of("g", pair=["a", "c"])


def test_rounding():
    assert rounded({"a": [0.123456, 3], "b": "x", "c": None, "d": True}) == {
        "a": [0.1235, 3],
        "b": "x",
        "c": None,
        "d": True,
    }


MEMORY = """import time
block = bytearray(80_000_000)
block[::4096] = bytes(len(block[::4096]))
time.sleep(4)"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_of_all_processes_is_added_up(tmp_path):
    (tmp_path / "memory.py").write_text(MEMORY)
    script = f"echo hello; {sys.executable} memory.py & {sys.executable} memory.py; wait; exit 3"
    status, seconds, peak = run_and_watch(
        ["bash", "-c", script], tmp_path, dict(os.environ), tmp_path / "log"
    )
    assert status == 3 and seconds > 3.9
    assert (tmp_path / "log").read_text().startswith("hello")
    assert 160e6 < peak < 240e6


def test_interrupted_commands_are_ended(tmp_path, monkeypatch):
    def interrupt(seconds):
        raise KeyboardInterrupt

    started, popen = [], figures.subprocess.Popen
    monkeypatch.setattr(
        figures.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[0]
    )
    monkeypatch.setattr(figures.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_and_watch(["sleep", "60"], tmp_path, dict(os.environ), tmp_path / "log")
    assert started[0].poll() is not None


def test_a_resumed_run_says_where_it_began(tmp_path, capsys, monkeypatch):
    def measure(run):
        folder = run.folder("raw")
        (folder / "rows").write_text("1")
        return {"f": {"value": 3}}

    measured = Group({"f": ">= 2"}, measure)
    for resume, commit in ((False, "a"), (True, "b"), (False, "c")):
        monkeypatch.setattr(figures, "git_commit", lambda commit=commit: commit)
        assert measure_topic([measured], Run("t", resume=resume))
        [row] = figures.read_rows(figures.RAW / "t.jsonl").values()
        assert row["commit"] == commit
        assert [one["commit"] for one in row.get("resumed", [])] == (["a"] if resume else [])
    (figures.RAW / "full" / "raw" / figures.BEGUN).unlink()
    assert measure_topic([measured], Run("t", resume=True))
    assert figures.read_rows(figures.RAW / "t.jsonl")["f"]["resumed"] == [{"folder": "raw", "commit": None}]
