"""Threads by affinity, cores and quotas of machines that are made up as files."""

import os
import subprocess
import sys

import pytest
import torch

from drafttrain.kernels.machine import describe_machine
from drafttrain.run import cli
from drafttrain.utils import threads


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Makes up a machine: `cores` lists the CPUs of each core, `allowed` are those in the affinity mask."""
    monkeypatch.delenv(threads.VARIABLE, raising=False)
    for name in ("CPUS", "CGROUPS", "OWN_CGROUPS"):
        monkeypatch.setattr(threads, name, tmp_path / name)

    def make(cores: list[list[int]], allowed=None, cgroup: str = "", files: dict[str, str] | None = None):
        for core in cores:
            for cpu in core:
                folder = tmp_path / "CPUS" / f"cpu{cpu}/topology"
                folder.mkdir(parents=True)
                (folder / "thread_siblings_list").write_text(",".join(map(str, core)) + "\n")
        everywhere = {cpu for core in cores for cpu in core}
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(allowed or everywhere), raising=False)
        if cgroup:
            (tmp_path / "OWN_CGROUPS").write_text(cgroup)
        for name, text in (files or {}).items():
            path = tmp_path / "CGROUPS" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return make


@pytest.mark.parametrize(
    ("cores", "allowed", "expected"),
    [
        ([[0]], None, 1),
        ([[0], [1]], None, 2),
        ([[0, 1]], None, 1),
        ([[0, 4], [1, 5], [2, 6], [3, 7]], None, 4),
        ([[0, 4], [1, 5], [2, 6], [3, 7]], {4, 5, 1}, 2),
        ([[cpu] for cpu in range(16)], None, 16),
        ([[cpu] for cpu in range(16)], {3, 9}, 2),
    ],
)
def test_physical_cores_in_the_affinity_mask(machine, cores, allowed, expected):
    machine(cores, allowed)
    assert threads.default_threads() == expected
    assert describe_machine(torch.device("cpu"))["cores"] == expected


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("50000 100000", 1), ("150000 100000", 2), ("1000000 100000", 4), ("max 100000", 4)],
)
def test_quota_of_cgroup_v2(machine, quota, expected):
    machine([[0], [1], [2], [3]], None, "0::/box\n", {"box/cpu.max": quota})
    assert threads.default_threads() == expected


@pytest.mark.parametrize(("quota", "expected"), [(50000, 1), (150000, 2), (-1, 4), ("damaged", 4)])
def test_quota_of_cgroup_v1(machine, quota, expected):
    files = {"cpu/box/cpu.cfs_quota_us": f"{quota}\n", "cpu/box/cpu.cfs_period_us": "100000\n"}
    machine([[0], [1], [2], [3]], None, "5:memory:/box\n4:cpu,cpuacct:/box\n0::/\n", files)
    assert threads.default_threads() == expected


def test_a_quota_further_out_counts(machine):
    files = {"user/box/cpu.max": "max 100000", "user/cpu.max": "200000 100000", "cpu.max": "max 100000"}
    machine([[cpu] for cpu in range(8)], None, "0::/user/box\n", files)
    assert threads.default_threads() == 2


def test_a_container_sees_its_own_cgroup_as_the_root(machine):
    machine([[cpu] for cpu in range(8)], None, "0::/docker/123\n", {"cpu.max": "300000 100000"})
    assert threads.default_threads() == 3


def test_other_systems_have_no_such_files(machine, monkeypatch):
    machine([], {0, 1, 2})  # a mask, and nothing about cores
    assert threads.default_threads() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert threads.default_threads() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert threads.default_threads() == 1


@pytest.mark.parametrize(
    ("value", "expected"), [("3", 3), ("7,2", 7), (" 1 ", 1), ("0", 2), ("", 2), ("many", 2)]
)
def test_the_user_decides(machine, monkeypatch, value, expected):
    machine([[0], [1]])
    monkeypatch.setenv(threads.VARIABLE, value)
    assert threads.default_threads() == expected


def test_threads_are_only_lowered(machine, monkeypatch):
    count = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: count[0])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: count.append(count.pop() and number))
    machine([[0], [1]])
    threads.limit_threads()
    assert count == [2]
    count[0] = 1  # chosen before
    threads.limit_threads()
    assert count == [1]


def test_the_command_line_computes_with_as_many(monkeypatch):
    """The variable is set before torch is imported, and a value of the user's stays."""
    monkeypatch.setenv(threads.VARIABLE, "")  # so that it is put back
    monkeypatch.delenv(threads.VARIABLE)
    monkeypatch.setattr(threads, "_physical_cores", lambda: 3)
    monkeypatch.setattr(threads, "_quota", lambda: 16.0)
    assert cli.main(["run", "nowhere.yaml"]) == 2
    assert os.environ[threads.VARIABLE] == "3"
    monkeypatch.setenv(threads.VARIABLE, "5")
    assert cli.main(["run", "nowhere.yaml"]) == 2
    assert os.environ[threads.VARIABLE] == "5"


def test_torch_follows_the_variable():
    code = "import torch; print(torch.get_num_threads())"
    environment = {**os.environ, threads.VARIABLE: "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout == "1\n"
