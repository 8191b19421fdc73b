"""Measuring a machine: how long runs are allowed to be, and one real measurement; speeds are not asserted."""

from types import SimpleNamespace

import pytest

from drafttrain.run import speeds
from drafttrain.run.speeds import PATIENCE_S, per_second


@pytest.mark.parametrize(
    ("seconds", "sizes"),
    [
        (0.001, [1, 4, 16, 64]),  # fast: the largest
        (0.1, [1, 4, 16]),  # enough at a second
        (2.0, [1, 4]),  # the first run may be slow because it is the first
        (PATIENCE_S + 1, [1]),
    ],
)
def test_sizes_grow_until_a_run_takes_long_enough(seconds, sizes, monkeypatch):
    now, seen = [0.0], []
    monkeypatch.setattr(speeds.time, "perf_counter", lambda: now[0])

    def run(size: int) -> int:
        seen.append(size)
        now[0] += size * seconds
        return 10 * size

    assert per_second(run, (1, 4, 16, 64)) == pytest.approx(10 / seconds)
    assert seen == sizes


def test_an_answer_that_stops_at_once_is_no_measurement(monkeypatch):
    """However slow the machine is: the plan divides by the speed."""
    now, tried = [0.0], []

    def engine(target, rows, *rest):
        tried.append(rows)

        def run(requests, on_step):
            for _ in range(1 if rows == 1 else 3):
                now[0] += PATIENCE_S
                on_step(rows)
            return requests

        return run

    monkeypatch.setattr(speeds, "in_process", engine)
    monkeypatch.setattr(speeds, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    speed, rows = speeds._generating(SimpleNamespace(vocab_size=10))
    assert tried == [1, 8] and rows == 8 and speed == pytest.approx(8 / PATIENCE_S)


def test_a_slow_machine_generates_few_answers_at_once(tiny_target, monkeypatch):
    """A clock that a forward of 8 answers takes past its patience: 32 are not tried."""
    tried, now, real = [], [0.0], speeds.in_process

    def engine(target, rows, *rest):
        tried.append(rows)
        return real(target, rows, *rest)

    def clock() -> float:
        now[0] += tried[-1] / 16 if tried else 0.0
        return now[0]

    monkeypatch.setattr(speeds, "in_process", engine)
    monkeypatch.setattr(speeds, "time", SimpleNamespace(perf_counter=clock))
    speed, rows = speeds._generating(tiny_target)
    assert tried == [1, 8] and rows in tried
    assert speed == pytest.approx(16)  # a token of each answer per forward, each forward rows / 16 s
