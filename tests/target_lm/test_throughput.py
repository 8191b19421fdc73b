"""The speed of bare forwards: what is timed, not how fast it is."""

from drafttrain.target_lm import throughput
from drafttrain.target_lm.throughput import forward_speed


def test_forward_speed_is_tokens_over_the_median_time(tiny_target, monkeypatch):
    clock = iter([0.0, 1.0, 1.0, 6.0, 6.0, 8.0])  # forwards of 1, 5 and 2 seconds
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: next(clock))
    assert forward_speed(tiny_target, rows=2, length=8, repeats=3) == 2 * 8 / 2


def test_forward_speed_stays_within_the_positions_of_the_target(tiny_target):
    assert forward_speed(tiny_target, rows=1, length=100_000, repeats=1) > 0
