"""Two gloo ranks equal one rank with twice the accumulation, plainly (DDP) and under DeepSpeed's ZeRO-2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.cli import main

ROOT = Path(__file__).parents[2]
STEPS = 20
# DeepSpeed compiles a transport of its own when it first meets a CPU: a minute that gloo can do without.
LAUNCHED = """
import runpy, sys
import deepspeed.comm.torch
deepspeed.comm.torch.build_shm_op = lambda: None
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


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_two_ranks_equal_one_with_doubled_accumulation(launcher, one_rank, recipe, tmp_path):
    path = recipe(launcher)
    script = [str(ROOT / "scripts" / "train_drafter.py"), "--config", str(path)]
    if launcher == "deepspeed":  # with what its launcher appends
        driver = tmp_path / "driver.py"
        driver.write_text(f"import sys; sys.argv = sys.argv[1:]\n{LAUNCHED}")
        zero2 = str(ROOT / "recipes" / "deepspeed" / "zero2.json")
        script = [str(driver), *script, "--deepspeed", zero2, "--local_rank=0"]
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
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    got = weights(path)
    assert got.keys() == one_rank.keys()
    for name, expected in one_rank.items():
        torch.testing.assert_close(got[name], expected, atol=1e-5, rtol=0, msg=name)
    assert (got["layers.0.input_layernorm.weight"] - 1).abs().max() > 0.01  # they have gone somewhere
