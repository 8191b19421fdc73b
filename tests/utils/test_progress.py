"""Progress away from a terminal: a line a minute, and nothing between."""

import io
import re

import pytest
from rich.console import Console

from drafttrain.utils import progress
from drafttrain.utils.progress import counted


def test_a_line_a_minute(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with counted("measuring [x]", 100, "turns", Console(file=out, width=20)) as step:
        for _ in range(10):
            now[0] += 25
            step(5)
    assert out.getvalue().splitlines() == [  # after 75, 150 and 225 s
        "measuring [x]: 15 of 100 turns, about 7 min left",
        "measuring [x]: 30 of 100 turns, about 6 min left",
        "measuring [x]: 45 of 100 turns, about 5 min left",
    ]


def test_nothing_done_for_minutes_gives_no_rate(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with counted("growing", 10, console=Console(file=out)) as step:
        now[0] = 300
        step(0)
        step(5)
    assert out.getvalue().splitlines() == ["growing: 5 of 10 steps, about 5 min left"]


def test_short_work_prints_nothing():
    out = io.StringIO()
    with counted("measuring", 3, console=Console(file=out)) as step:
        for _ in range(3):
            step()
    assert out.getvalue() == ""


def test_a_terminal_gets_a_bar():
    out = io.StringIO()
    with counted("measuring", 2, console=Console(file=out, force_terminal=True)) as step:
        step()
    assert "measuring" in out.getvalue() and "50%" in out.getvalue()


@pytest.mark.parametrize("start", [0.0, 30.0, 55.0])
@pytest.mark.parametrize("noise", [1.0, 1.3])
def test_time_left_is_right_after_a_minute(start, noise, monkeypatch):
    """Within a factor of 1.5, though the work began late and single steps differ."""
    now, out = [0.0], io.StringIO()
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    with counted("measuring", 400, console=Console(file=out, width=200)) as step:
        now[0] = start
        for number in range(400):
            now[0] += 1.5 * (noise if number % 2 else 1 / noise)
            step()
    lines = out.getvalue().splitlines()
    assert len(lines) > 8
    for line in lines:
        done, number, unit = re.search(r"(\d+) of 400 steps, about ([\d.]+) (s|min) left", line).groups()
        left = 1.5 * (noise + 1 / noise) / 2 * (400 - int(done))
        assert left / 1.5 <= float(number) * (60 if unit == "min" else 1) <= left * 1.5, line


def test_unequal_steps_are_weighed_by_their_work(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    out = io.StringIO()
    with counted("answering", 3, "answers", Console(file=out), done=1) as step:
        now[0] = 90.0
        step(0, (30.0, 120.0), "30 tokens")
        now[0] = 180.0
        step(1, (90.0, 120.0))
    assert out.getvalue().splitlines() == [
        "answering: 1 of 3 answers, 30 tokens, about 4 min left",
        "answering: 2 of 3 answers, about 45 s left",
    ]
