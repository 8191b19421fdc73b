import pytest
import torch

from drafttrain.run import cli
from drafttrain.utils.memory import memory_problem


def allocate():
    torch.empty(1 << 60, dtype=torch.uint8)


def allocate_by_python():
    bytearray(1 << 60)


@pytest.mark.parametrize("function", [allocate, allocate_by_python])
def test_a_command_without_memory_ends_in_one_line(function, monkeypatch, capsys):
    monkeypatch.setattr(cli, "_function", lambda name, suffix="": lambda args: suffix or function())
    assert cli.main(["generate"]) == 2
    assert capsys.readouterr().err.startswith("drafttrain: memory: not enough for these settings (")


def test_a_gpu_without_memory():
    assert "CUDA out of memory" in memory_problem(torch.OutOfMemoryError("CUDA out of memory. Tried x"))


def test_other_errors_are_left_alone():
    assert memory_problem(RuntimeError("shapes differ")) is None
