"""The measurements of topic main, run on the tiny target."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from drafttrain.data.config import CorpusConfig, PromptSet, Source
from drafttrain.drafters.config import DrafterConfig
from drafttrain.evaluation import evaluate
from drafttrain.evaluation.config import EvaluateConfig
from drafttrain.training.config import TrainingConfig
from studies import goals as figures
from studies.figures import machine_quickstart
from studies.goals import Run


@pytest.fixture
def script(tmp_path, monkeypatch, tiny_bundle, questions):
    """The script over the tiny bundle and four chats instead of benchmarks, in an empty folder."""
    module = importlib.import_module("studies.figures.main")
    monkeypatch.chdir(tmp_path)
    for name in ("QUICKSTART_DRAFTER",):
        monkeypatch.setattr(module, name, tiny_bundle)
    monkeypatch.setattr(module, "PROMPTS", dict.fromkeys(("mt_bench", "gsm8k"), str(questions)))
    monkeypatch.setattr(module, "NEW_TOKENS", 6)
    monkeypatch.setattr(evaluate, "check_quiet", lambda refuse: None)
    monkeypatch.setattr(figures, "check_quiet", lambda refuse: None)
    return module


def test_accept_len_is_that_of_the_stored_runs(script):
    figure = script.accept_len(Run("main", quick=True), script.QUICKSTART_DRAFTER, Path("here"))
    assert figure["size"] == {"prompts": {"mt_bench": 4}, "repeats": 1} and figure["value"] >= 1
    raw = [json.loads(line) for line in Path("here/measurements.jsonl").open()][1:]
    emitted = [len(row["runs"]["chain"]["token_ids"]) - 1 for row in raw]
    steps = [row["runs"]["chain"]["stats"]["steps"] for row in raw]
    assert len(raw) == 4 and figure["value"] == sum(emitted) / sum(steps)


def test_fp32_compares_every_prompt(script):
    figure = script.exactness(Run("main"))["fp32_mismatches"]
    size = {"prompts": {"mt_bench": 4, "gsm8k": 4}}
    assert figure == {"value": 0, "prompts": 8, "differences": [], "size": size}


def test_speed_uses_the_recipes_lengths_in_full_and_the_bundles_in_quick_runs(script, monkeypatch, questions):
    recipe = EvaluateConfig(
        trees=["chain:length=1", "chain:length=2"],
        tune_prompts=PromptSet("held out", str(questions), limit=1),
        lossless_prompts=16,
    )
    monkeypatch.setattr(script, "load_recipe", lambda path: SimpleNamespace(evaluate=recipe))
    measured = script.speed(Run("main"))
    assert set(measured) == {
        "quickstart_speedup_ar",
        "quickstart_speedup_transformers",
        "quickstart_accept_len",
    }
    assert all(figure["value"] > 0 for figure in measured.values())
    size = {"prompts": {"mt_bench": 4, "gsm8k": 4}, "repeats": 3}
    assert all(figure["size"] == size for figure in measured.values())
    low, high = measured["quickstart_speedup_ar"]["interval"]
    assert low <= measured["quickstart_speedup_ar"]["value"] <= high
    summary = json.loads(Path("runs/figures/full/speed/summary.json").read_text())
    assert [trial["tree"] for trial in summary["tuning"]] == recipe.trees
    assert measured["quickstart_accept_len"]["tree"] == summary["tree"]
    script.speed(Run("main", quick=True))
    summary = json.loads(Path("runs/figures/quick/speed/summary.json").read_text())
    assert summary["tuning"] == [] and summary["lossless"] is None


def test_training_ratios(script, monkeypatch, tiny_target_folder, tmp_path):
    words = "one two three four five six seven eight nine ten"
    chats = [
        {"conversations": [{"from": "human", "value": f"{i}?"}, {"from": "gpt", "value": f"{i} {words}"}]}
        for i in range(30)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    recipe = SimpleNamespace(
        corpus=CorpusConfig(sources=[Source(str(tmp_path / "chats.jsonl"))], validation_fraction=0.1),
        target=SimpleNamespace(model=str(tiny_target_folder), dtype="bfloat16", device="cpu"),
        drafter=DrafterConfig(tapped_blocks=[-2], draft_vocab_size=100),
        training=TrainingConfig(rows_per_batch=1, row_length=128, block_length=(2, 4)),
    )
    monkeypatch.setattr(script, "load_recipe", lambda path: recipe)
    real = script.training_speed
    monkeypatch.setattr(
        script, "training_speed", lambda *args, rounds: real(*args, rounds=1, steps=1, shapes=[(1, 16)])
    )
    measured = script.training(Run("main", quick=True))
    rounds = json.loads(Path("runs/figures/quick/training/rounds.json").read_text())
    ratio = rounds["online"][0] / rounds["forward"]["1x16"][0]
    assert measured["train_ratio"]["value"] == pytest.approx(ratio)
    assert measured["offline_ratio"]["value"] == pytest.approx(rounds["offline"][0] / rounds["online"][0])
    assert measured["train_ratio"]["ok"] is False  # 100 tokens are no vocabulary of 8k


@pytest.mark.parametrize("losses, ok", [([3.0, 2.5, 2.4], True), ([3.0, 2.5, 2.5], False), ([3.0], False)])
def test_scratch_wants_a_falling_loss(script, monkeypatch, tiny_bundle, losses, ok):
    class Workflow:
        def __init__(self, recipe, stages):
            self.output = Path(recipe[recipe.index("--output") + 1])

        def run(self):
            log = [{"loss": 9.0}, *({"eval_loss": loss} for loss in losses)]
            (self.output / "train").mkdir(parents=True)
            (self.output / "train/training_log.json").write_text(json.dumps(log))

        def folder(self, stage):
            return tiny_bundle if stage == "export" else self.output / stage

    monkeypatch.setattr(script, "Workflow", Workflow)
    monkeypatch.setattr(script, "load_recipe", lambda path, overrides: overrides)
    figure = script.scratch(Run("main"))["scratch_accept_len"]
    assert figure["ok"] is ok and figure["held_out_kl"] == [losses] * 3 and figure["value"] >= 1
    assert figure["size"] == {"prompts": {"mt_bench": 4}, "repeats": 1, "seeds": 3}


@pytest.mark.parametrize("status", [0, 1])
def test_quickstart_runs_in_a_fresh_clone(script, monkeypatch, status):
    seen = {}

    def clone(command, check):
        seen["clone"] = Path(command[-1])
        (seen["clone"] / "runs/quickstart/bundle").mkdir(parents=True)
        (seen["clone"] / "runs/quickstart/evaluation").mkdir()
        (seen["clone"] / "runs/quickstart/bundle/config.json").write_text("{}")
        (seen["clone"] / "runs/quickstart/summary.json").write_text('{"wall_seconds": 900}')

    def watch(command, cwd, environment, log):
        seen.update(command=command, cwd=cwd, cache=environment["DRAFTTRAIN_CACHE"])
        return status, 1234.5, 4_500_000_000

    monkeypatch.setattr(machine_quickstart.subprocess, "run", clone)
    monkeypatch.setattr(machine_quickstart, "run_and_watch", watch)
    if status:
        with pytest.raises(RuntimeError, match="ended with 1; see runs/figures/full/quickstart/log.txt"):
            script.quickstart(Run("main"))
        return
    assert script.quickstart(Run("main")) == {
        "quickstart_wall_s": {"value": 1234.5, "stages_wall_s": 900},
        "peak_rss_gb": {"value": 4.5},
    }
    assert seen["command"] == ["bash", "scripts/quickstart.sh"] and seen["cwd"] == seen["clone"]
    assert Path(seen["cache"]).parent == seen["clone"].parent and not seen["clone"].exists()
    assert Path("runs/figures/full/quickstart/bundle/config.json").exists()
