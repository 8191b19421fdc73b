"""The machine as a measurement records it."""

import pytest
import torch

from drafttrain.kernels import machine
from drafttrain.kernels.difference import machine_difference
from drafttrain.kernels.machine import describe_machine

CPU = torch.device("cpu")


def test_description_has_what_timings_depend_on(monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)  # the suite may run with it
    described = describe_machine(CPU)
    assert described["threads"] == torch.get_num_threads() and described["device"] == "cpu"
    assert described["processor"] and described["onednn_isa"] == "all" and "dtype" not in described
    assert described["torch_isa"] == torch.backends.cpu.get_cpu_capability()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    limited = describe_machine(CPU, torch.bfloat16)
    described["kernel"] = limited["kernel"]  # follows that limit, too
    assert limited == {**described, "onednn_isa": "AVX2", "dtype": "bfloat16"}


CORES = """processor	: {i}
model name	: Some CPU @ 2 GHz
flags		: sse fma avx2 avx512_bf16 hypervisor
"""


def test_processor_is_read_from_proc(monkeypatch, tmp_path):
    (tmp_path / "cpuinfo").write_text("\n".join(CORES.format(i=i) for i in range(4)))
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    described = describe_machine(CPU)
    assert (described["processor"], described["features"]) == ("Some CPU @ 2 GHz", "avx2 fma avx512_bf16")


def test_systems_without_cpuinfo(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "none")
    described = describe_machine(CPU)
    assert described["features"] == ""
    assert described["processor"]


@pytest.mark.parametrize("name", ["processor", "features", "torch_isa", "onednn_isa", "kernel", "threads"])
def test_what_makes_another_machine(name):
    here = describe_machine(CPU)
    assert machine_difference({**here, "load": 0.5, "cores": 99}, here) is None
    assert machine_difference({**here, name: "x"}, here) == f"{name} x, and this is {here[name]}"
    older = {key: value for key, value in here.items() if key != name}
    assert machine_difference(older, here) == f"a machine with unknown {name}, and this is {here[name]}"


def test_a_gpu_is_another_machine():
    here = describe_machine(CPU)
    assert machine_difference({**here, "gpu": "X1"}, here) == "gpu X1, and this is None"
    assert machine_difference(here, {**here, "gpu": "X1"}) == "a machine with unknown gpu, and this is X1"
