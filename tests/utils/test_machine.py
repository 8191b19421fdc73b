"""Other processes' load from /proc/stat, with a clock and counters that the test turns."""

from types import SimpleNamespace

import pytest
import torch

from drafttrain.utils import machine
from drafttrain.utils.errors import UserError
from drafttrain.utils.machine import OtherLoad, check_quiet

CPU = torch.device("cpu")


class Fake:
    """Ten seconds pass between two looks; `busy` and `own` are cores in use by all and by this process.
    Beside the cores that may be used there is one that always works."""

    def __init__(self, monkeypatch, tmp_path, cores=2, threads=2):
        self.cores = cores
        self.clock, self.jiffies, self.own_seconds = 0.0, 0, 0.0
        self.stat = tmp_path / "stat"
        monkeypatch.setattr(machine, "STAT", self.stat)
        monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)
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
        share, rest = divmod(self.jiffies, self.cores)
        lines = ["cpu  9 9 9 9 9 9 9 9 9 9"]
        for core in range(self.cores):
            ticks = share + (rest if core == 0 else 0)
            user = ticks // 2  # the rest is nice; idle and iowait are no work
            lines.append(f"cpu{core} {user} {ticks - user} 0 777777 5555 0 0 0 0 0")
        lines.append(f"cpu{self.cores} {round(100 * self.clock)} 0 0 0 0 0 0 0 0 0")
        self.stat.write_text("\n".join([*lines, "intr 5 4 3", "ctxt 8", ""]))


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


def test_one_core_of_several(monkeypatch, tmp_path):
    """As under `taskset`: a process on another core takes nothing, one on ours takes it."""
    fake = Fake(monkeypatch, tmp_path, cores=1, threads=1)
    load = OtherLoad()
    fake.work(1.0, 1.0)
    assert load.lap() == pytest.approx(0)
    fake.work(1.0, 0.6)
    assert load.lap() == pytest.approx(0.4)


def test_systems_without_proc_report_nothing(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "STAT", tmp_path / "stat")
    assert OtherLoad().lap() is None
    (tmp_path / "stat").write_text("cpu 1 1 1 1\ncpu999 1 1 1 1\n")  # none of our cores
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


def test_ended_children_are_our_own_work(monkeypatch, tmp_path):
    """The children that a measurement waits for do not count as load."""
    fake = Fake(monkeypatch, tmp_path)
    load = OtherLoad()
    times = machine.os.times()
    ended = SimpleNamespace(children_user=times.children_user + 12, children_system=times.children_system + 3)
    monkeypatch.setattr(machine.os, "times", lambda: ended)
    fake.work(2.0, 0.5)
    assert load.lap() == pytest.approx(0, abs=0.01)
