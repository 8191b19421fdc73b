"""Two gloo ranks equal one rank with twice the accumulation, plainly (DDP) and under DeepSpeed's ZeRO-2."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.run.cli import main
from tests.training.conftest import quick
from tests.training.several import run

ROOT = Path(__file__).parents[2]
ZERO2 = str(ROOT / "recipes" / "deepspeed" / "zero2.json")
STEPS = 20
# DeepSpeed compiles a transport of its own when it first meets a CPU: a minute that gloo can do without.
LAUNCHED = """
import importlib, runpy, sys
# not by its name after an import: there, deepspeed.comm.torch is torch itself
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def recipe(target_folder, corpus_folder, tmp_path_factory):
    """A recipe whose corpus has been built; returns a function that gives one with another output folder."""
    folder = tmp_path_factory.mktemp("ranks")

    def write(name: str) -> Path:
        path = folder / f"{name}.yaml"
        path.write_text(
            f"""
target: {{model: {target_folder}, dtype: float32, device: cpu}}
corpus:
  sources: [{{path: {corpus_folder.parent / "chats.jsonl"}}}]
  max_length: 96
  validation_fraction: 0.1
drafter: {{tapped_blocks: [-2], draft_vocab_size: 200}}
training:
  lr: 3.0e-3
  schedule: constant
  rows_per_batch: 1
  row_length: 192
  max_steps: {STEPS}
  eval_steps: 1000
  eval_prompt_limit: 2
  eval_new_tokens: 8
  save_steps: 10
  bf16: false
output: {folder / name}
""",
            encoding="utf-8",
        )
        for stage in ("fetch-target", "corpus"):
            assert main(["run", str(path), "--only", stage]) == 0
        return path

    return write


def weights(recipe: Path) -> dict[str, torch.Tensor]:
    folder = recipe.with_suffix("") / "drafter"
    assert (folder / "stage.json").exists()
    return load_file(folder / "drafter" / "model.safetensors")


@pytest.fixture(scope="module")
def one_rank(recipe) -> dict[str, torch.Tensor]:
    path = recipe("one")
    assert main(["train", str(path), "--training.gradient_accumulation_steps", "2"]) == 0
    return weights(path)


@pytest.fixture(scope="module")
def jobs(target_folder, corpus_folder, small_lm_folder, tmp_path_factory):
    """The training of `several.py`; `one` is trained by this process."""
    small = {"kind": "causal_lm", "model": str(small_lm_folder)}
    drafters = {
        "vdm": {"kind": "vdm"},
        "eagle": {"kind": "eagle", "noise": 0.5},
        "medusa": {"kind": "medusa", "heads": 3},
        "causal_lm": small,
        "lora": {**small, "lora_rank": 4},
    }
    config = quick(rows_per_batch=1, gradient_accumulation_steps=2, max_steps=8, eval_new_tokens=4)
    jobs = {
        "target": str(target_folder),
        "corpus": str(corpus_folder),
        "out": str(tmp_path_factory.mktemp("kinds") / "one"),
        "drafters": {name: {**fields, "draft_vocab_size": 200} for name, fields in drafters.items()},
        "training": dataclasses.asdict(config),
    }
    run(jobs)
    return jobs


def launch(launcher: str, script: list[str], folder: Path) -> None:
    """Runs a script on two ranks, in a folder; under DeepSpeed with what its launcher appends."""
    if launcher == "deepspeed":
        driver = folder / "driver.py"
        driver.write_text(f"import sys; sys.argv = sys.argv[1:]\n{LAUNCHED}")
        script = [str(driver), *script, "--deepspeed", ZERO2, "--local_rank=0"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *script,
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd=folder)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module", params=["torchrun", "deepspeed"])
def two_ranks(request, recipe, jobs, tmp_path_factory) -> tuple[Path, Path]:
    """The recipe that the script has trained on two ranks, and the folder of what `several.py` has trained
    there."""
    path, folder = recipe(request.param), tmp_path_factory.mktemp(request.param)
    training = {**jobs["training"], "gradient_accumulation_steps": 1}
    if request.param == "deepspeed":
        training["deepspeed"] = ZERO2
    out = folder / "two"
    (folder / "jobs.json").write_text(json.dumps({**jobs, "training": training, "out": str(out)}))
    script = [str(ROOT / "scripts" / "train_drafter.py"), "--config", str(path)]
    several = [str(Path(__file__).with_name("several.py")), str(folder / "jobs.json")]
    launch(request.param, [*several, *script], folder)
    return path, out


def test_two_ranks_equal_one_with_doubled_accumulation(two_ranks, one_rank):
    got = weights(two_ranks[0])
    assert got.keys() == one_rank.keys()
    for name, expected in one_rank.items():
        torch.testing.assert_close(got[name], expected, atol=1e-5, rtol=0, msg=name)
    assert (got["layers.0.input_layernorm.weight"] - 1).abs().max() > 0.01  # they have gone somewhere


def test_every_kind_on_two_ranks_equals_one_with_doubled_accumulation(two_ranks, jobs):
    """EAGLE sees the noise that one process sees on the same rows, so it has the same weights in the end."""
    out = two_ranks[1]
    for name in jobs["drafters"]:
        got, expected = (
            load_file(folder / name / "drafter" / "model.safetensors") for folder in (out, Path(jobs["out"]))
        )
        losses = [
            entry["loss"]
            for entry in json.loads((out / name / "training_log.json").read_text())
            if "loss" in entry
        ]
        assert len(losses) == 8 and sum(losses[-3:]) < 0.99 * sum(losses[:3]), (name, losses)
        assert got.keys() == expected.keys()
        for tensor, value in expected.items():
            torch.testing.assert_close(got[tensor], value, atol=2e-5, rtol=0, msg=f"{name} {tensor}")

    one = load_file(Path(jobs["out"]) / "eagle" / "noise-0.safetensors")
    ranks = [load_file(out / "eagle" / f"noise-{rank}.safetensors") for rank in (0, 1)]
    for key in ("noise", "states"):
        together = torch.stack([rank[key] for rank in ranks], 1).flatten(0, 1)  # rows of a step side by side
        torch.testing.assert_close(together, one[key], atol=1e-6, rtol=0)
    rows = one["noise"].flatten(1)  # [16, T·H]
    assert rows.abs().max() <= 0.5 + 1e-5 and rows.std() > 0.28  # uniform: 0.5 / sqrt(3)
    apart = torch.corrcoef(rows) - torch.eye(len(rows))
    assert apart.abs().max() < 0.05  # no two rows have the same
