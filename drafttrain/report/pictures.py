"""The figures of a page as PNG files, for papers: the same drawings in the page's light colors."""

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

import resvg_py
from markupsafe import Markup

from drafttrain.calibration.calibration import Calibration
from drafttrain.classifier.train import REPORT as CLASSIFIER_REPORT
from drafttrain.evaluation.sweep import Point
from drafttrain.report.bundles import classifier_panels, costs, reliability
from drafttrain.report.measured import sweep_chart
from drafttrain.report.panels import Bars, Panel, Section, Tree
from drafttrain.report.raw import BundleFiles
from drafttrain.report.svg import HATCH, LETTER, WIDTH, drawn, sign, tag, text
from drafttrain.utils.files import read_json
from drafttrain.utils.writing import whole_file

ACROSS, GAP, TITLE = 3, 24.0, 18.0  # panels in a row; space between them, height of a title
CLASSIFIER_PICTURES = "classifier_reliability.png", "classifier_recall.png"
ZOOM = 2.5  # pixels per unit
FONTS = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSansMono.ttf")  # matplotlib brings them


def write_pictures(sections: list[Section], folder: Path) -> list[Path]:
    """Write a picture for each section with panels, and one for each tree; return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for section in sections:
        if flat := [without_flags(panel) for panel in section.panels if not isinstance(panel, Tree)]:
            written[folder / f"{section.name}.png"] = sheet(flat, section.legend)
        for i, tree in enumerate((panel for panel in section.panels if isinstance(panel, Tree)), 1):
            written[folder / f"{section.name}_{i}.png"] = sheet([tree], [])
    for path, picture in written.items():
        _write(path, picture)
    return list(written)


def write_sweep(points: Sequence[Point], path: Path) -> None:
    """Write the points of a sweep as a picture."""
    numbers = {family: i for i, family in enumerate(dict.fromkeys(point.family for point in points))}
    legend = [(family, number, True) for family, number in numbers.items()]
    _write(path, sheet([sweep_chart("verified tokens and accept_len", points, numbers)], legend))


def draw_calibration(folder: str | os.PathLike) -> None:
    """Write `costs.png` and `reliability.png` of the calibration in a folder into it."""
    made = BundleFiles("calibration", Calibration.load(folder), None, None, None, [])
    write_pictures([reliability([made]), costs([made], {})], Path(folder))


def draw_classifier(folder: str | os.PathLike) -> None:
    """Write the pictures of the classifier in a folder into it: its confidence against acceptance, and its
    recall by share of nodes kept."""
    panels = classifier_panels("C2T", read_json(Path(folder) / CLASSIFIER_REPORT))
    for name, panel in zip(CLASSIFIER_PICTURES, panels):
        _write(Path(folder) / name, sheet([panel], []))


def _write(path: Path, picture: str) -> None:
    with whole_file(path) as file:
        file.write(to_png(picture))


def without_flags(panel: Panel) -> Panel:
    """Return the panel without numbers of warnings, which only the page prints."""
    if not isinstance(panel, Bars):
        return panel
    return replace(panel, bars=[replace(bar, flags=[]) for bar in panel.bars])


def sheet(panels: list[Panel], legend: list[tuple[str, int | str, bool]]) -> Markup:
    """Return panels with their titles, three in a row, and their legend below, as one SVG document."""
    y, width, parts = 0.0, 0.0, []
    for start in range(0, len(panels), ACROSS):
        x, below = 0.0, 0.0
        for panel in panels[start : start + ACROSS]:
            across, down, elements = drawn(panel)
            place = f"translate({x:.1f} {y + TITLE:.1f})"
            parts += [text(x + 4, y + 12, panel.title, class_="title"), tag("g", *elements, transform=place)]
            x, below = x + max(across, LETTER * len(panel.title)) + GAP, max(below, down)
        y, width = y + TITLE + below + GAP, max(width, x - GAP)
    x = 4.0
    for name, style, line in legend:
        size = 36 + LETTER * len(name) + 12
        if x > 4 and x + size > max(width, WIDTH):
            x, y = 4.0, y + 16
        parts.append(sign(style, line, transform=f"translate({x:.1f} {y:.1f})"))
        parts.append(text(x + 34, y + 11, name))
        x += size
    height = y + 20 if legend else y - GAP + 4
    style = re.sub(r"var\((--\w+)\)", lambda name: colors()[name[1]], stylesheet())
    return tag(
        "svg",
        tag("style", Markup(style)),
        HATCH,
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        width=width,
        height=height,
        viewBox=f"0 0 {width:.1f} {height:.1f}",
    )


def stylesheet() -> str:
    """Return the style sheet of the figures."""
    return (files("drafttrain.report") / "figures.css").read_text(encoding="utf-8")


def colors() -> dict[str, str]:
    """Return the page's light colors by variable."""
    return dict(re.findall(r"(--\w+): (#\w+);", stylesheet().partition("}")[0]))


def to_png(picture: str) -> bytes:
    """Convert an SVG document; system fonts stand in only for letters that DejaVu lacks."""
    fonts = Path(find_spec("matplotlib").origin).parent / "mpl-data" / "fonts" / "ttf"
    return bytes(
        resvg_py.svg_to_bytes(
            svg_string=str(picture),
            background=colors()["--paper"],
            zoom=ZOOM,
            font_files=[str(fonts / name) for name in FONTS],
            font_family="DejaVu Sans",
            sans_serif_family="DejaVu Sans",
            monospace_family="DejaVu Sans Mono",
        )
    )
