"""Progress away from a terminal: a line a minute, and nothing between."""

import io

from rich.console import Console

from drafttrain import progress
from drafttrain.progress import counted


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


def test_nothing_done_for_minutes_tells_no_rate(monkeypatch):
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
