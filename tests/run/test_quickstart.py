"""The quickstart over its tiny twin: as it comes, with the instructions of an older processor, on a machine
that is too slow for each stage, killed, and with the user's own settings."""

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.run import quickstart
from drafttrain.run.budget import UNLIMITED, Speeds, plan, rows_of
from drafttrain.run.cli import main
from drafttrain.run.quickstart import untouched
from drafttrain.run.recipe import load_recipe
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json

ROOT = Path(__file__).parents[2]
FAST = Speeds(0.1, 5000.0, 8, 5000.0, 5000.0, 500.0, 500.0, 500.0)
SLOW = Speeds(0.1, 1.0, 8, 1.0, 1.0, 1.0, 1.0, 1.0)
HASTY = """
import sys
from drafttrain.run.cli import main
from tests.hasty import hasty_calibrations, short_looks
with hasty_calibrations(), short_looks():
    sys.exit(main(sys.argv[1:]))
"""  # the command line in a process of its own
WAITING = (
    """
import signal, sys
from pathlib import Path
from drafttrain.training.trainer import DraftTrainer
compute_loss, losses = DraftTrainer.compute_loss, []
plan = Path(sys.argv[sys.argv.index("--output") + 1]) / "quickstart.json"
def wait(*args, **options):
    losses.extend([1] if plan.exists() else [])  # before there is one, speeds are measured
    if len(losses) == 2:
        print("train waits", flush=True)
        signal.pause()
    return compute_loss(*args, **options)
DraftTrainer.compute_loss = wait
"""
    + HASTY
)  # the same, stopped after the first step of training
OLDER = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}


pytestmark = pytest.mark.usefixtures("hasty_calibration")


@pytest.fixture
def words(tiny_target_folder, tiny_bundle, tmp_path, monkeypatch) -> list[str]:
    """The command over the tiny target, in the repository."""
    monkeypatch.chdir(ROOT)
    place = ["--target.model", str(tiny_target_folder), "--training.init_from", str(tiny_bundle)]
    recipe = ["--recipe", "recipes/tiny/quickstart.yaml", "--output", str(tmp_path / "run")]
    return ["quickstart", *recipe, *place]


@pytest.fixture
def speeds(monkeypatch):
    """Sets what is measured; returns how often it was."""
    measured = []

    def stub(found: Speeds) -> list[int]:
        def measure_speeds(recipe, model: str) -> Speeds:
            measured.append(1)
            return found

        monkeypatch.setattr("drafttrain.run.speeds.measure_speeds", measure_speeds)
        return measured

    return stub


def done(printed: str) -> list[str]:
    """Stages that ran."""
    lines = (line.split() for line in printed.splitlines())
    return [line[0] for line in lines if len(line) > 1 and line[1] == "done"]


def run_dir(words: list[str]) -> Path:
    return Path(words[words.index("--output") + 1])


def check_result(out: Path) -> None:
    summary = read_json(out / "summary.json")
    assert summary["lossless"] is True and summary["accept_len"] >= 1
    assert summary["speedup"] > 0 and summary["speedup_transformers"] > 0
    assert (out / "bundle" / "README.md").exists()


def test_measured_planned_and_run(words, capsys, monkeypatch):
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "this machine: " in printed and "plan for 20 min: 6 answers, 4 steps on 30 conv" in printed
    assert ", a short calibration, 2 prompts a task, " in printed
    stages = ["fetch-target", "regenerate", "corpus", "collect", "train", "calibrate", "evaluate", "export"]
    assert done(printed) == stages
    out = run_dir(words)
    check_result(out)
    record = read_json(out / "quickstart.json")
    assert min(record["speeds"].values()) > 0 and 1100 < record["seconds"] < 1200
    assert record["overrides"]["training.max_steps"] == 4
    assert read_json(out / "bundle" / "calibration.json")["quick"] is True

    def never(recipe, model):
        raise AssertionError("measured again")

    monkeypatch.setattr("drafttrain.run.speeds.measure_speeds", never)
    assert main(words) == 0  # the same plan again: all is up to date, and the table is shown
    printed = capsys.readouterr().out
    assert done(printed) == [] and "accept" in printed and "equal plain decoding" in printed


def test_with_the_instructions_of_an_older_processor(words):
    command = [sys.executable, "-c", HASTY, *words]
    environment = {**os.environ, **OLDER, "PYTHONPATH": str(ROOT)}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert finished.returncode == 0, finished.stderr
    check_result(run_dir(words))


def test_too_slow_for_everything(words, speeds, tiny_bundle, capsys):
    speeds(SLOW)
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert done(printed) == ["fetch-target", "train", "evaluate", "export"]
    assert f"no training: measuring takes the time; {tiny_bundle} is measured without" in printed
    assert "no calibration, so no trees that need one: timed:max_depth=2" in printed
    assert "1 of 2 tasks are measured" in printed and "speedup" in printed
    summary, drafter = read_json(run_dir(words) / "summary.json"), run_dir(words) / "drafter" / "drafter"
    assert summary["train_tokens"] == 0 and summary["accept_len"] >= 1
    taken, given = (load_file(place / "model.safetensors") for place in (drafter, tiny_bundle))
    assert all(torch.equal(given[name], tensor) for name, tensor in taken.items())
    assert {path.name for path in drafter.iterdir()} == {"config.json", "model.safetensors"}


def test_too_slow_for_new_answers(words, speeds, capsys):
    speeds(Speeds(**{**vars(FAST), "generate": 0.4}))
    assert main([*words, "--training.eval_new_tokens", "2"]) == 0
    printed = capsys.readouterr().out
    assert "no regeneration: " in printed and "the bundled answers are trained on" in printed
    assert done(printed) == ["fetch-target", "corpus", "collect", "train", "calibrate", "evaluate", "export"]
    check_result(run_dir(words))


def test_regeneration_out_of_time_falls_back_on_the_bundled_answers(words, speeds, capsys):
    speeds(FAST)
    assert main([*words, "--regenerate.max_minutes", "1e-9"]) == 0
    captured = capsys.readouterr()
    assert "no answer was finished before regenerate.max_minutes" in captured.err
    assert read_json(run_dir(words) / "corpus" / "corpus.json")["counts"]["train"]["examples"] > 0
    check_result(run_dir(words))


def test_a_killed_quickstart_goes_on_with_its_plan(words, speeds, capsys):
    command = [sys.executable, "-c", WAITING, *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert any("train waits" in line for line in process.stdout)
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL
    before = read_json(run_dir(words) / "quickstart.json")
    measured = speeds(SLOW)  # planning again would give another plan
    assert main(words) == 0
    assert measured == [] and read_json(run_dir(words) / "quickstart.json") == before
    assert done(capsys.readouterr().out) == ["train", "calibrate", "evaluate", "export"]
    check_result(run_dir(words))


def test_other_minutes_are_planned_again(words, speeds, capsys):
    measured = speeds(SLOW)
    assert main(words) == 0
    assert main([*words, "--minutes", "30"]) == 0
    assert measured == [1, 1] and read_json(run_dir(words) / "quickstart.json")["made_for"]["minutes"] == 30


def test_the_users_settings_win(words, speeds, capsys):
    speeds(SLOW)
    settings = ["--evaluate.max_new_tokens", "5", "--evaluate.trees", "[timed:max_depth=2]"]
    assert main([*words, *settings]) == 0
    printed = capsys.readouterr().out
    assert "calibrate" in done(printed)  # that tree takes a calibration
    bundle = run_dir(words) / "bundle"
    assert f"the bundle is in {bundle}; next:\n  drafttrain generate --bundle {bundle} --prompt" in printed
    summary = read_json(run_dir(words) / "evaluation" / "summary.json")
    assert summary["max_new_tokens"] == 5 and summary["tree"] == "timed:max_depth=2"


@pytest.mark.parametrize(
    ("key", "kept"),
    [
        ("regenerate", {"evaluate.trees"}),
        ("regenerate.sources", {"evaluate.trees"}),
        ("regenerate.sources.path", {"evaluate.trees"}),
        ("regenerate.max_rows", {"evaluate.trees", "regenerate.sources"}),
        ("evaluate.trees", {"regenerate.sources"}),
    ],
)
def test_what_the_user_touches_is_not_planned(key, kept):
    overrides = {"regenerate.sources": [], "evaluate.trees": []}
    assert set(untouched(overrides, [f"--{key}", "1"])) == kept


def test_a_key_of_a_section_that_does_not_fit_is_refused():
    overrides = {"regenerate": None, "evaluate.trees": []}
    assert set(untouched(overrides, ["--regenerate", "null"])) == {"evaluate.trees"}
    with pytest.raises(UserError, match="--regenerate.temperature: must be left out where regenerate does"):
        untouched(overrides, ["--regenerate.temperature", "0.5"])


FULL = ["--calibrate.quick", "false", "--calibrate.prompts", "{name: a, path: data/tuning_prompts.jsonl}"]


@pytest.mark.parametrize(
    ("given", "trees", "speeds", "quick", "prompts"),
    [
        ([], [], FAST, True, None),
        ([], [], SLOW, False, None),
        (["--calibrate.quick", "false", "--evaluate.trees", "[chain:length=1]"], [], FAST, None, None),
        (FULL, [], FAST, True, None),  # of the recipe: the plan's is shorter
        ([], ["--evaluate.trees", "[timed]"], SLOW, True, None),
        ([], FULL, SLOW, False, "a"),
    ],
)
def test_which_calibration_is_planned(given, trees, speeds, quick, prompts, monkeypatch):
    """`given` stands for what the recipe says, `trees` for what the user does."""
    monkeypatch.chdir(ROOT)
    recipe = load_recipe("recipes/quickstart.yaml", given)
    planned = plan(speeds, 1200, recipe)
    found = untouched(quickstart.overrides_of(planned, speeds, recipe), trees)
    planned_words = [word for key, value in found.items() for word in (f"--{key}", json.dumps(value))]
    settled = load_recipe("recipes/quickstart.yaml", [*given, *planned_words, *trees]).calibrate
    assert settled.quick == bool(quick) and (settled.prompts and settled.prompts.name) == prompts
    assert ("calibrate" in found) == (quick is not None and not prompts)


@pytest.mark.parametrize("minutes", ["0", "-3", "nan", "inf", "1.9"])
def test_minutes_that_make_no_sense(minutes, words, capsys):
    assert main([*words, "--minutes", minutes]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert f"--minutes: must be >= 2 and finite, got {float(minutes):g}; 2 is enough" in err
    assert not math.isfinite(float(minutes)) or not run_dir(words).exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["--minutes", "soon"], "--minutes: must be a number, got soon"),
        (["--recipe", "nowhere.yaml"], "nowhere.yaml: no such recipe file"),
        (["--training.init_from", "null"], "training.init_from: must be set for the quickstart, got null"),
        (["--evaluate.trees", "[]"], "evaluate.trees: must be set for the quickstart, got []"),
        (["--training.max_stepps", "1"], "unknown key training.max_stepps"),
    ],
)
def test_mistakes_are_one_line(settings, message, words, capsys):
    assert main([*words, *settings]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


@pytest.mark.parametrize("text, problem", [("{", "cannot be read as JSON"), ("[]", "damaged (")])
def test_a_damaged_record_is_named(text, problem, words, capsys):
    run_dir(words).mkdir()
    (run_dir(words) / "quickstart.json").write_text(text)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert f"quickstart.json: {problem}" in error and error.count("\n") == 1


def test_sources_share_what_is_planned(monkeypatch):
    monkeypatch.chdir(ROOT)
    sources = json.dumps([{"path": "a", "max_conversations": 5}, {"path": "b"}])
    recipe = load_recipe("recipes/quickstart.yaml", ["--corpus.sources", sources])
    assert rows_of(recipe.corpus.sources) == 5 + UNLIMITED
    limits = [(s.path, s.max_conversations) for s in quickstart._first_rows(recipe.corpus.sources, 7)]
    assert limits == [("a", 5), ("b", 2)]
    assert len(quickstart._first_rows(recipe.corpus.sources, 4)) == 1
