"""Peak memory of the process, reset between what is looked at."""

import sys

import numpy as np
import pytest
import torch

from drafttrain.evaluation import memory
from drafttrain.evaluation.memory import covered, peak_bytes, reset_peak

CPU = torch.device("cpu")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_each_peak_begins_again():
    if not reset_peak(CPU):
        pytest.skip("this system does not let a process reset its peak")
    before = peak_bytes(CPU)
    block = np.ones(20_000_000)  # 160 MB, given back when it goes
    del block
    assert peak_bytes(CPU) > before + 150e6
    reset_peak(CPU)
    assert peak_bytes(CPU) < before + 50e6


def test_nothing_is_claimed_where_nothing_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "CLEAR", tmp_path / "no" / "file")
    monkeypatch.setattr(memory, "STATUS", tmp_path / "no" / "status")
    assert reset_peak(CPU) is False and peak_bytes(CPU) is None


def test_words():
    assert "resident" in covered(CPU) and "GPU" in covered(torch.device("cuda"))
