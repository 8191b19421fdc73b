"""Teams of threads on a machine whose cores others use, with simulated times."""

import threading
from collections.abc import Callable

import pytest
import torch

from drafttrain.kernels import team
from drafttrain.kernels.build import library
from drafttrain.kernels.cores import FIRST_PAUSE, LONGEST_PAUSE, WINDOW, Cores, team_times
from drafttrain.kernels.linear import NativeLinear, is_available
from drafttrain.kernels.team import native_team


class Machine:
    """A machine with some cores left, and a team that works on it in calls of 1 ms."""

    def __init__(self, free: float):
        self.free, self.calls, self.worked, self.had = free, 0, 0.0, 0.0
        self.cores = Cores(lambda: (self.worked, self.had), lambda: 1e-3 * self.calls)

    def work(self, seconds: float, threads: int, free: Callable[[int], float] | None = None) -> list[int]:
        """Make calls; return the threads of each.

        Args:
            free: cores left in a call, by its number; as many as in other calls unless given.
        """
        sizes = []
        for _ in range(round(1e3 * seconds)):
            sizes.append(self.cores.fit(threads))
            if sizes[-1] > 1:  # the library counts teams alone
                self.worked += 1e-3 * sizes[-1]
                self.had += 1e-3 * min(sizes[-1], free(self.calls) if free else self.free)
            self.calls += 1
        return sizes


def tries(sizes: list[int]) -> list[int]:
    """Return the numbers of the calls that try the full size again."""
    return [i for i in range(1, len(sizes)) if sizes[i] > sizes[i - 1]]


@pytest.mark.parametrize("threads", (1, 2, 8))
def test_a_team_that_has_its_cores_keeps_its_size(threads):
    assert set(Machine(free=threads).work(5.0, threads)) == {threads}


@pytest.mark.parametrize(
    "threads, free, fewer", ((2, 1.5, 1), (2, 0.7, 1), (8, 7.5, 7), (8, 3.2, 3), (8, 0.2, 1))
)
def test_a_team_without_its_cores_gets_smaller(threads, free, fewer):
    sizes = Machine(free).work(0.1, threads)
    first = sizes.index(fewer)
    assert set(sizes[:first]) == {threads} and first <= 1e3 * WINDOW + 2
    assert set(sizes[first:]) == {fewer}


@pytest.mark.parametrize("threads, free", ((2, 1.8), (8, 7.7), (32, 31), (64, 62)))
def test_a_little_load_changes_nothing(threads, free):
    assert set(Machine(free).work(5.0, threads)) == {threads}


def test_short_bursts_change_nothing():
    assert set(Machine(2).work(5.0, threads=2, free=lambda call: 1.0 if call % 200 < 10 else 2.0)) == {2}


def test_a_fork_counts_from_0():
    machine = Machine(free=2)
    machine.work(1.0, threads=2)
    machine.worked = machine.had = 0.0
    assert set(machine.work(1.0, threads=2)) == {2}
    machine.free = 1.0
    assert machine.work(0.2, threads=2)[-1] == 1


def test_what_was_before_is_not_judged():
    machine = Machine(free=2)
    machine.worked, machine.had = 10.0, 5.0
    assert set(machine.work(1.0, threads=2)) == {2}


def test_the_full_size_is_tried_ever_more_seldom():
    machine = Machine(free=1.5)
    sizes = machine.work(10.0, threads=2)
    starts = tries(sizes)
    gaps = [1e-3 * (b - a) for a, b in zip(starts, starts[1:])]
    assert len(gaps) > 4 and gaps == sorted(gaps)
    assert FIRST_PAUSE < gaps[0] < 3 * FIRST_PAUSE and LONGEST_PAUSE < gaps[-1] < 1.1 * LONGEST_PAUSE
    assert sizes.count(2) < 0.05 * len(sizes)


def test_the_full_size_returns_with_the_cores():
    machine = Machine(free=0.5)
    machine.work(5.0, threads=2)
    machine.free = 2
    later = machine.work(LONGEST_PAUSE + 2 * WINDOW, threads=2)
    assert later[-1] == 2 and set(machine.work(3.0, threads=2)) == {2}
    machine.free = 0.5
    assert len(tries(machine.work(6 * FIRST_PAUSE, threads=2))) == 2  # after short pauses again


def test_a_smaller_team_that_has_its_cores_stays_until_the_next_try():
    machine = Machine(free=7.4)
    sizes = machine.work(10.0, threads=8)
    assert sizes.count(8) < 0.05 * len(sizes) and sizes.count(7) > 0.9 * len(sizes)


@pytest.mark.skipif(not is_available(), reason="no native library")
def test_the_library_counts_how_long_its_teams_work():
    layer, x = NativeLinear(torch.randn(512, 256)), torch.randn(64, 256)
    with native_team(1):
        before = team_times()
        layer(x)
        assert team_times() == before
    out = torch.empty(64, 512)
    for _ in range(20):
        library().linear(layer.address, x.data_ptr(), 64, out.data_ptr(), layer.round_inputs, 2)
    worked, had = (now - then for now, then in zip(team_times(), before))
    assert worked > 0 and 0 < had < 1.1 * worked


@pytest.fixture
def three_threads():
    """Let torch take three threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def in_a_thread(work) -> None:
    """Run a function in a thread of its own, to its end."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


@pytest.mark.skipif(not is_available(), reason="no native library")
@pytest.mark.usefixtures("three_threads")
def test_a_thread_that_begins_inside_a_team_has_as_many_cores():
    """It inherits the one of torch's operators there; afterwards all have what they had."""
    found = []

    def other():
        with native_team():
            found.append(team._native.size)
        found.append(torch.get_num_threads())

    with native_team():
        in_a_thread(other)
    assert found == [3, 3] and torch.get_num_threads() == 3
    torch.set_num_threads(1)  # chosen
    with native_team():
        assert team._native.size == 1


@pytest.mark.skipif(not is_available(), reason="no native library")
@pytest.mark.usefixtures("three_threads")
def test_a_thread_that_was_born_inside_a_team_has_its_cores_also_after_it():
    """As a server's, whose first operator runs during somebody else's request and whose own comes later."""
    found, born, ended = [], threading.Event(), threading.Event()

    def other():
        found.append(torch.get_num_threads())
        born.set()
        ended.wait(10)
        with native_team():
            found.append(team._native.size)
        found.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    with native_team():
        thread.start()
        assert born.wait(10)
    ended.set()
    thread.join()
    assert found == [1, 3, 3] and torch.get_num_threads() == 3


@pytest.mark.skipif(not is_available(), reason="no native library")
@pytest.mark.usefixtures("three_threads")
def test_one_thread_that_is_chosen_stays_in_workers_too():
    """After a decode of the main thread on more of them."""
    found = []

    def worker():
        torch.set_num_threads(1)
        with native_team():
            found.append(team._native.size)
        found.append(torch.get_num_threads())

    with native_team():
        pass
    in_a_thread(worker)
    assert found == [1, 1]
