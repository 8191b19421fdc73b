"""Trains one drafter after another in this process, alone or as a rank, after a script with its arguments:
starting processes takes longer than these trainings.

    torchrun --nproc-per-node 2 several.py JOBS.json SCRIPT --config RECIPE
"""

import json
import os
import runpy
import sys
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file

from drafttrain.drafters.config import DrafterConfig
from drafttrain.drafters.eagle import EagleModel
from drafttrain.training.config import TrainingConfig
from drafttrain.training.train import train


def run(jobs: dict) -> None:
    """Trains `jobs["drafters"]`, name -> fields of DrafterConfig, each into the folder `jobs["out"]`/name.
    EAGLE's noise, [rows, T, H], goes into noise-RANK.safetensors there, beside the states that it was for."""
    real, noise, states = EagleModel._noisy, [], []

    def recorded(self, tapped, row_seeds):
        noisy = real(self, tapped, row_seeds)
        noise.append(noisy - tapped)
        states.append(tapped)
        return noisy

    for name, fields in jobs["drafters"].items():
        out = Path(jobs["out"]) / name
        with mock.patch.object(EagleModel, "_noisy", recorded):
            train(
                TrainingConfig(**jobs["training"]),
                DrafterConfig(**fields),
                jobs["target"],
                jobs["corpus"],
                out,
                target_dtype="float32",
                target_device="cpu",
            )
        if fields["kind"] == "eagle":
            tensors = {"noise": torch.cat(noise), "states": torch.cat(states)}
            save_file(tensors, out / f"noise-{os.environ.get('RANK', '0')}.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, jobs, *sys.argv = sys.argv
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    run(json.loads(Path(jobs).read_text(encoding="utf-8")))
