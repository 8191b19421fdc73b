"""Other processes' load from /proc/stat, with a clock and counters that the test turns."""

import pytest
import torch

from drafttrain.errors import UserError
from drafttrain.evaluation import machine
from drafttrain.evaluation.machine import OtherLoad, check_quiet, describe_machine


class Fake:
    """Ten seconds pass between two looks; `busy` and `own` are cores in use by all and by this process."""

    def __init__(self, monkeypatch, tmp_path, cores=2, threads=2):
        self.clock, self.jiffies, self.own_seconds = 0.0, 0, 0.0
        self.stat = tmp_path / "stat"
        monkeypatch.setattr(machine, "STAT", self.stat)
        monkeypatch.setattr(machine.os, "cpu_count", lambda: cores)
        monkeypatch.setattr(machine.os, "sysconf", lambda name: 100)
        monkeypatch.setattr(machine.torch, "get_num_threads", lambda: threads)
        monkeypatch.setattr(machine.time, "monotonic", lambda: self.clock)
        monkeypatch.setattr(machine.time, "process_time", lambda: self.own_seconds)
        monkeypatch.setattr(machine.time, "sleep", lambda seconds: self.work(*self.planned))
        self.planned = (0.0, 0.0)
        self.work(0, 0)

    def work(self, busy: float, own: float) -> None:
        self.clock += 10
        self.jiffies += round(busy * 1000)
        self.own_seconds += own * 10
        user = self.jiffies // 2  # the rest is nice; idle and iowait are no work
        self.stat.write_text(f"cpu  {user} {self.jiffies - user} 0 777777 5555 0 0 0 0 0\ncpu0 1 1 1\n")


@pytest.mark.parametrize(
    "threads, busy, own, taken",
    [(2, 2.0, 2.0, 0.0), (2, 2.0, 1.0, 1.0), (2, 0.5, 0.0, 0.5), (1, 2.0, 1.0, 0.0), (1, 2.0, 0.5, 0.5)],
)
def test_only_work_that_takes_our_cores_counts(monkeypatch, tmp_path, threads, busy, own, taken):
    fake = Fake(monkeypatch, tmp_path, threads=threads)
    load = OtherLoad()
    fake.work(busy, own)
    assert load.lap() == pytest.approx(taken)
    fake.work(0.1, 0.1)  # a lap begins where the last one ended
    assert load.lap() == pytest.approx(0)


def test_systems_without_proc_do_not_tell(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "STAT", tmp_path / "none")
    assert OtherLoad().lap() is None
    assert check_quiet(refuse=True, seconds=0) is None


def test_busy_machines_are_refused_or_warned_about(monkeypatch, tmp_path):
    fake = Fake(monkeypatch, tmp_path)
    fake.planned = (1.2, 0.0)
    with pytest.raises(UserError, match="other processes take 1.2 of the 2 cores"):
        check_quiet(refuse=True)
    assert "1.2 of the 2 cores" in check_quiet(refuse=False)
    fake.planned = (0.2, 0.0)
    assert check_quiet(refuse=True) is None


def test_description_has_what_timings_depend_on():
    described = describe_machine(torch.device("cpu"))
    assert described["threads"] == torch.get_num_threads() and described["device"] == "cpu"
    assert described["processor"]
