"""Recorded figures say what they are of, and the tables of README and results have no other numbers.

A table is preceded by `<!-- from: FILE, … -->`, paths from the root. Each number in its cells must be in
those files, to as many digits as are shown; in a row that begins with a figure's name, in that figure's
record. Goals (`≥ 1.5`), code, first columns and headings are not looked at. In README.md paragraphs with
decimals need a source as well.
"""

import importlib
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from studies.figures.__main__ import TOPICS
from studies.goals import judge

ROOT = Path(__file__).parents[1]
RECORDED = sorted((ROOT / "docs/figures").glob("*.jsonl"))
HISTORY = sorted((ROOT / "docs/figures/history").glob("*.jsonl"))
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs/results").glob("*.md"))]
SOURCE = re.compile(r"<!-- from: (.+) -->")
NUMBER = re.compile(r"(?<![\w.-])-?\d[\d,]*(?:\.\d+)?(?![\w.]*\d)( ?%)?")
# code, goals, links, "10 of 80 prompts"
NOT_MEASURED = re.compile(r"`[^`]*`|[≥≤<>=] ?-?[\d.,]+|\]\([^)]*\)|\d+ of \d+ \w+")


def problem(row: dict) -> str | None:
    """Return what a recorded figure lacks, or None."""
    for key in ("figure", "value", "goal", "commit", "machine", "measured"):
        if row.get(key) in (None, "", {}):
            return f"no {key}"
    if not re.fullmatch(r"[0-9a-f]{40}", row["commit"]):
        return f"commit {row['commit']}: measured on a changed working tree"
    if not re.match(r"\d{4}-\d\d-\d\dT", row["measured"]):
        return f"measured {row['measured']}: no date"
    if row["ok"] is not True and not row.get("why"):
        return "not ok and no reason"
    return None


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_recorded_figures_are_complete():
    rows = [row for path in RECORDED for row in records(path)]
    assert {row["figure"]: found for row in rows if (found := problem(row))} == {}


@pytest.mark.parametrize("path", [one for one in RECORDED if one.stem in TOPICS], ids=lambda path: path.stem)
def test_what_is_recorded_as_reached_is_by_the_present_definition(path):
    groups, doubtful = {name: group for group in TOPICS[path.stem] for name in group.goals}, {}
    for row in records(path):
        name, group = row["figure"], groups[row["figure"]]
        assert row["goal"] == group.goals[name], name
        ok, why = judge(row["goal"], row, group.size, group.floor(name))
        if row["ok"] is True and ok is not True:
            doubtful[name] = why
    assert doubtful == {}


@pytest.mark.parametrize("path", HISTORY, ids=lambda path: path.stem)
def test_history_is_never_ok_and_says_why(path):
    assert all(row["ok"] is None and row["why"] for row in records(path))


WHOLE = {
    "figure": "a",
    "value": 0,
    "goal": "== 0",
    "ok": True,
    "commit": "0" * 40,
    "machine": {"processor": "x"},
    "measured": "2026-11-22T07:30:18+0000",
}


@pytest.mark.parametrize(
    "change, expected",
    [
        ({}, None),
        ({"machine": None}, "no machine"),
        ({"machine": {}}, "no machine"),
        ({"commit": None}, "no commit"),
        ({"commit": "0" * 40 + "+changes"}, "changed working tree"),
        ({"measured": None}, "no measured"),
        ({"measured": "lately"}, "no date"),
        ({"ok": False}, "no reason"),
        ({"ok": None, "why": "10 of 80 prompts"}, None),
    ],
)
def test_what_is_refused(change, expected):
    found = problem(WHOLE | change)
    assert found is None if expected is None else expected in found


def leaves(value: object) -> Iterator[float]:
    """All numbers in a JSON value, keys and texts included."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(key)
            yield from leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, str):
        yield from (float(number) for number in re.findall(r"-?\d+\.?\d*", value))
    elif isinstance(value, int | float):
        yield float(value)


def values(path: Path, figure: str | None = None) -> list[float]:
    """Numbers of a file; of one figure's record where it has that."""
    if path.suffix == ".jsonl":
        return list(leaves([row for row in records(path) if figure in (None, row["figure"])]))
    text = path.read_text(encoding="utf-8")
    return list(leaves(json.loads(text) if path.suffix == ".json" else text))


def is_among(shown: str, percent: bool, found: list[float]) -> bool:
    """Return True if a number, rounded as it is shown, is among others."""
    digits = len(shown.partition(".")[2])
    number, half = float(shown.replace(",", "")), 0.5 * 10**-digits + 1e-9
    scaled = [100 * one for one in found] if percent else []
    return any(abs(one - number) <= half for one in [*found, *scaled])


def unknown(cell: str, found: list[float]) -> list[str]:
    """Numbers of a text that are not among those measured."""
    text = NOT_MEASURED.sub(" ", cell)
    return [m[0] for m in NUMBER.finditer(text) if not is_among(m[0].rstrip(" %"), bool(m[1]), found)]


def blocks(page: Path) -> Iterator[tuple[list[str], list[str]]]:
    """Paragraphs and tables with the sources named in front of them; no code."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for block in re.split(r"\n\s*\n", text):
        lines = [line for line in block.split("\n") if line.strip()]
        sources = [source for line in lines if (m := SOURCE.fullmatch(line)) for source in m[1].split(", ")]
        yield [line for line in lines if not SOURCE.fullmatch(line)], sources


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_tables_have_no_other_numbers_than_their_sources(page):
    wrong = {}
    for lines, sources in blocks(page):
        if len(lines) < 3 or not lines[1].startswith("|---"):
            continue
        for line in lines[2:]:
            first, *cells = [cell.strip() for cell in line.strip("|").split("|")]
            figure = re.fullmatch(r"`(\w+)`", first)
            figure = figure[1] if figure and any("figures" in source for source in sources) else None
            numbers = [number for source in sources for number in values(ROOT / source, figure)]
            if found := [number for cell in cells for number in unknown(cell, numbers)]:
                wrong[line[:60]] = found
    assert wrong == {}


def test_paragraphs_of_the_readme_have_no_other_decimals_than_their_sources():
    wrong = {}
    for lines, sources in blocks(PAGES[0]):
        text = " ".join(line for line in lines if not line.startswith("|"))
        numbers = [number for source in sources for number in values(ROOT / source)]
        if found := [number for number in unknown(text, numbers) if "." in number]:
            wrong[text[:60]] = found
    assert wrong == {}


def test_summaries_are_what_the_measurements_give(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    (tmp_path / "data").symlink_to(ROOT / "data")
    bundle = "model_cards/smollm2-135m-edd"
    (tmp_path / bundle).mkdir(parents=True)
    shutil.copy(ROOT / bundle / "eval.json", tmp_path / bundle)
    monkeypatch.chdir(tmp_path)
    assert importlib.import_module("studies.recompute").main() == 0
    folders = (tmp_path / "docs", tmp_path / bundle)
    written = [path for folder in folders for path in folder.rglob("*.json*") if path.suffix != ".gz"]
    assert len(written) > 20
    for path in written:
        committed = ROOT / path.relative_to(tmp_path)
        if path.stat().st_size < 1e6 and path.read_bytes() != committed.read_bytes():
            assert values(path) == pytest.approx(values(committed), rel=1e-3), path.name


def test_a_number_that_nobody_measured_is_found():
    assert unknown("1.56 (1.40 to 1.70), 22 %", [1.5551, 1.4, 0.219]) == ["1.70"]
    assert unknown("`chain:length=3`, ≥ 1.5, 10 of 80 prompts", []) == []
    assert unknown("1,175 and 12 ms", [1174.9]) == ["12"]
