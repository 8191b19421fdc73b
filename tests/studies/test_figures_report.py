"""The figures of the report page, from the committed raw data."""

import importlib
from pathlib import Path

from studies import goals as figures
from studies.goals import Run

ROOT = Path(__file__).parents[2]


def test_page(monkeypatch, tmp_path):
    module = importlib.import_module("studies.figures.report")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(figures, "check_quiet", lambda refuse: None)
    monkeypatch.setattr(figures, "RAW", tmp_path)
    found = module.page(Run("report", quick=True))
    assert set(found) == {name for group in module.GROUPS for name in group.goals}
    assert found["report_mb"]["ok"] and found["report_mb"]["figures"] > 20  # every section is there
    size = (tmp_path / "quick/report/report.html").stat().st_size
    assert found["report_mb"]["value"] == size / 1e6 and found["report_s"]["value"] > 0
