"""`drafttrain reason` on tiny targets: traces, pages, sums, resuming, and mistakes in one line."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from drafttrain.inference.proposer import TreeProposer
from drafttrain.kernels.linear import is_available
from drafttrain.reasoning.branches import Rounds
from drafttrain.reasoning.scheduler import ScheduledDecoder
from drafttrain.run import cli
from drafttrain.self_draft.proposer import SelfDraft
from drafttrain.utils.files import read_json

ROOT = Path(__file__).parents[2]


@pytest.fixture
def words(tiny_target_folder, tmp_path, monkeypatch):
    """Return a function that makes the words of a command with a tiny target."""
    monkeypatch.chdir(ROOT)
    place = ["--target", str(tiny_target_folder), "--out", str(tmp_path / "out")]
    return lambda task, *more: ["reason", f"recipes/tiny/reasoning/{task}.yaml", *place, *more]


def test_a_run_writes_traces_pages_and_sums_and_continues(words, tmp_path, capsys):
    assert cli.main(words("gsm8k", "--task.limit", "2")) == 0
    out = tmp_path / "out"
    assert sorted(path.name for path in out.iterdir()) == [
        ".hashes.json", "1.html", "1.json", "660.html", "660.json", "summary.json",
    ]  # fmt: skip
    lines = capsys.readouterr().out.strip().split("\n")
    assert lines[0] == f"2 problems, 0 finished before; traces and pages: {out}"
    assert [line.split(": ")[0] for line in lines[1:3]] == ["1 of 2, problem 1", "2 of 2, problem 660"]
    assert len(lines) == 4 and lines[3].startswith("trees 2, success ")
    trace, sums = read_json(out / "1.json"), read_json(out / "summary.json")
    assert trace["finished"] and sums["trees"] == 2 and sums["calls"] == 2 * (2 * 2 * 3 + 1)
    written = (out / "1.json").stat().st_mtime_ns
    assert cli.main(words("gsm8k", "--task.limit", "2")) == 0  # everything is there
    assert (out / "1.json").stat().st_mtime_ns == written and read_json(out / "summary.json") == sums
    assert cli.main(words("gsm8k", "--task.limit", "2", "--seed", "1")) == 2
    assert "1.json: must be the trace of seed 1, got 0; remove it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "tree"), [("bundle", "chain:length=2"), ("lm", "chain:length=2"), ("null", "ngram")]
)
def test_drafts_do_not_change_the_tree(
    words, kind, tree, tiny_bundle, tiny_target_folder, tmp_path, monkeypatch
):
    """By a drafter, by an untrained small LM (the target itself), or by n-grams without a drafter."""
    assert cli.main(words("writing")) == 0
    proposers, make = [], ScheduledDecoder.__post_init__
    monkeypatch.setattr(
        ScheduledDecoder, "__post_init__", lambda self: proposers.append(self.proposer) or make(self)
    )
    drafter = str({"bundle": tiny_bundle, "lm": tiny_target_folder, "null": "null"}[kind])
    drafted = ["--drafter", drafter, "--tree", tree, "--out", str(tmp_path / "drafted")]
    assert cli.main(words("writing", *drafted)) == 0
    assert [type(one) for one in proposers] == [SelfDraft if tree == "ngram" else TreeProposer]
    plain, other = (read_json(tmp_path / place / "writing-1.json") for place in ("out", "drafted"))
    assert [entry["calls"] for entry in plain["rounds"]] == [entry["calls"] for entry in other["rounds"]]
    assert (plain["leaf"], plain["closing"]) == (other["leaf"], other["closing"])


@pytest.mark.skipif(not is_available(), reason="torch's operators round the rows of a forward differently")
def test_a_run_that_is_ended_goes_on_with_sampled_drafts(words, tiny_bundle, tmp_path, monkeypatch):
    """After some answers of a round, on the trace that a whole run writes."""
    drafts = ["--drafter", str(tiny_bundle), "--tree", "drawn:k_config=3-2", "--scheduler.sequences", "3"]
    drafts += ["--max_new_tokens", "8"]
    assert cli.main(words("writing", *drafts)) == 0
    answer, answers = ScheduledDecoder.answer, []

    def ended(self, calls, then):
        def take(number, given):
            if len(answers) == 3:
                raise KeyboardInterrupt
            answers.append(given)
            return then(number, given)

        return answer(self, calls, take)

    command = words("writing", *drafts, "--out", str(tmp_path / "ended"))
    with monkeypatch.context() as patch:
        patch.setattr(ScheduledDecoder, "answer", ended)
        assert cli.main(command) == 130
    whole, part = (read_json(tmp_path / place / "writing-1.json") for place in ("out", "ended"))
    assert [len(entry["calls"]) for entry in part["rounds"]] == [3] and not part["finished"]
    assert len(whole["rounds"][0]["calls"]) > 3 and sum(one.stats.verify_tokens for one in answers) > 0
    assert cli.main(command) == 0
    traces = [whole, read_json(tmp_path / "ended" / "writing-1.json")]
    for trace in traces:
        assert all(entry.pop("seconds") >= 0 for entry in trace["rounds"])
    assert traces[0] == traces[1]


def test_a_run_that_is_killed_goes_on(words, tmp_path):
    """At once, with SIGKILL, after its third save."""
    killed = (
        "import os, signal, sys\n"
        "from drafttrain.reasoning.trace import Trace\n"
        "from drafttrain.run import cli\n"
        "save, saved = Trace.save, []\n"
        "def dying(self, path):\n"
        "    save(self, path)\n"
        "    saved.append(path)\n"
        "    len(saved) < 3 or os.kill(os.getpid(), signal.SIGKILL)\n"
        "Trace.save = dying\n"
        "cli.main(sys.argv[1:])\n"
    )
    command = words("gsm8k", "--task.limit", "2", "--out", str(tmp_path / "killed"))
    assert subprocess.run([sys.executable, "-c", killed, *command]).returncode == -signal.SIGKILL
    part = read_json(tmp_path / "killed" / "1.json")
    assert part["rounds"] and not part["finished"]
    assert cli.main(command) == cli.main(words("gsm8k", "--task.limit", "2")) == 0
    for name in ("1.json", "660.json"):
        whole, resumed = (read_json(tmp_path / place / name) for place in ("out", "killed"))
        for trace in (whole, resumed):
            assert all(entry.pop("seconds") >= 0 for entry in trace["rounds"])
        assert whole == resumed


def test_prompts_that_are_too_long_end_their_branches(words, tmp_path, capsys):
    assert cli.main(words("blocksworld")) == 0
    trace = read_json(next((tmp_path / "out").glob("*instance*.json")))
    assert trace["result"] is None and "positions" in trace["error"]
    assert "no result: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "more, message",
    [
        (
            ["--task.path", "data/eval/mbpp.jsonl"],
            "data/eval/mbpp.jsonl:row 1: must be a problem of gsm8k with",
        ),
        (["--task.path", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--thoughts", "0"], "recipes/tiny/reasoning/gsm8k.yaml: thoughts: must be >= 1 and <= 1000, got 0"),
        (["--target", "nowhere/at-all"], "nowhere/at-all"),
    ],
)
def test_mistakes(more, message, words, capsys):
    assert cli.main(words("gsm8k", *more)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_warning_is_one_line(words, capsys):
    """Without the file and the line of code that Python shows."""
    overlap = ["--scheduler.overlap", "true", "--scheduler.threads", "[9, 9]"]
    assert cli.main(words("writing", *overlap)) == 0
    error = capsys.readouterr().err  # loading the target may write to it, too
    [line] = [line for line in error.splitlines() if "threads" in line]
    assert "UserWarning" not in error and "scheduler.py" not in error
    assert line.startswith("drafttrain: warning: scheduler.threads: must add up to at most ")
    assert line.endswith(" cores, got 9 and 9; they will wait for each other")


def test_a_worker_that_hangs_is_an_error_in_one_line(words, tiny_bundle, monkeypatch, capsys):
    take, released = Rounds.take, threading.Event()
    monkeypatch.setattr(Rounds, "take", lambda *given, **more: take(*given, **{"patience": 0.3} | more))
    monkeypatch.setattr("drafttrain.reasoning.execution.propose_many", lambda *given: released.wait(60))
    drafts = ["--drafter", str(tiny_bundle), "--tree", "chain:length=2"]
    try:
        assert cli.main(words("writing", *drafts, "--scheduler.overlap", "true")) == 2
    finally:
        released.set()
    error = capsys.readouterr().err
    [line] = [line for line in error.splitlines() if "worker" in line]
    assert line == (
        "drafttrain: scheduler.overlap: must be false here, got True (no draft and no verdict for 0.3 s: a "
        "worker hangs); repeat the command with --scheduler.overlap false, it continues the run"
    )
    assert "Traceback" not in error


def test_keys(capsys):
    for more, line in (
        ([], "thoughts (int, default 3)"),
        (["scheduler"], "scheduler.verifier (one | batched"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["reason", "--keys", *more])
        assert end.value.code == 0 and line in capsys.readouterr().out
