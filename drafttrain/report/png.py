"""The same panels as PNG files, for papers."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, ScalarFormatter

from drafttrain.report.panels import Bar, Bars, Chart, Panel, Tree
from drafttrain.report.sections import Section
from drafttrain.utils.files import save_figure

COLORS = ("#0072b2", "#c44e00", "#00805e", "#a8487f", "#2f8fc4", "#a87400", "#4d5560")
MARKERS = ("o", "s", "^", "D", "v", "x", "+")
DASHES = ("-", "--", ":", "-.")
BARS = {"best": "#0072b2", "plain": "#7fb2d6", "baseline": "#b3bac2", "bad": "white"}
KINDS = {"best": "method of the headline", "baseline": "baseline", "bad": "slower than autoregressive"}
CEILING = "accept_len: speedup at most"
BOXES = {"root": "#f0f0f0", "accepted": "#d6eaf8", "refused": "white", "own": "#fde3c8"}
ORANGE = "#c44e00"
MARK = {"color": ORANGE, "linewidth": 2}
INTERVAL = {"color": "black", "linewidth": 1, "marker": "|", "markersize": 4}
ACROSS = 3  # panels beside each other
DPI = 200


def write_pictures(sections: list[Section], folder: Path) -> list[Path]:
    """A picture for each section with panels; trees get one each. Returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for section in sections:
        flat = [panel for panel in section.panels if not isinstance(panel, Tree)]
        if flat:
            written.append(folder / f"{section.name}.png")
            save_figure(_grid(flat), written[-1], DPI)
        for i, tree in enumerate((p for p in section.panels if isinstance(p, Tree)), 1):
            written.append(folder / f"{section.name}_{i}.png")
            save_figure(_draw_tree(tree), written[-1], DPI)
    return written


def _grid(panels: list[Panel]) -> Figure:
    columns = min(ACROSS, len(panels))
    rows = -(-len(panels) // columns)
    tallest = max(1.2 + 0.3 * len(p.bars) if isinstance(p, Bars) else 3.4 for p in panels)
    figure = Figure(figsize=(4.6 * columns, max(3.0, tallest) * rows))
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for axis, panel in zip(axes, panels):
        axis.set_title(_plain(panel.title), fontsize=9)
        (_draw_bars if isinstance(panel, Bars) else _draw_chart)(axis, panel)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    if key := _key([bar for panel in panels if isinstance(panel, Bars) for bar in panel.bars]):
        figure.legend(handles=key, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=3, fontsize=7)
    return figure


def _key(bars: list[Bar]) -> list[Patch | Line2D]:
    """What bars of each kind and the marks on them are, where they are there."""
    kinds = {bar.kind for bar in bars}
    key: list[Patch | Line2D] = [
        Patch(**_face(kind), label=label) for kind, label in KINDS.items() if kind in kinds
    ]
    if any(bar.ceiling is not None for bar in bars):
        key.append(Line2D([], [], label=CEILING, **MARK))
    if any(bar.low is not None and bar.high is not None for bar in bars):
        key.append(Line2D([], [], label="95 % interval", **INTERVAL))
    return key


def _face(kind: str) -> dict[str, str | None]:
    bad = kind == "bad"
    return {
        "facecolor": BARS[kind],
        "hatch": "////" if bad else None,
        "edgecolor": ORANGE if bad else BARS[kind],
    }


def _plain(text: str) -> str:
    """Text without formulas: a dollar sign is a dollar sign."""
    return text.replace("$", r"\$")


def _draw_bars(axis: Axes, panel: Bars) -> None:
    places = range(len(panel.bars))[::-1]
    for y, bar in zip(places, panel.bars):
        axis.barh(y, bar.value, height=0.6, **_face(bar.kind))
        if bar.low is not None and bar.high is not None:
            axis.plot([bar.low, bar.high], [y, y], **INTERVAL)
        if bar.ceiling is not None:
            axis.plot([bar.ceiling] * 2, [y - 0.4, y + 0.4], **MARK)
    axis.set_yticks(list(places), [_plain(bar.label) for bar in panel.bars], fontsize=6)
    axis.set_xlabel(panel.axis)
    if panel.reference is not None:
        axis.axvline(panel.reference, color="black", linewidth=0.8)


def _draw_chart(axis: Axes, panel: Chart) -> None:
    for series in panel.series:
        color = COLORS[series.style % len(COLORS)]
        again = series.style // len(COLORS)  # as on the page
        marker = MARKERS[(series.style + again) % len(MARKERS)]
        dash = DASHES[(series.style + 2 * again) % len(DASHES)]
        joined = series.front or (list(zip(series.xs, series.ys)) if series.line else [])
        if joined:
            axis.plot(*zip(*joined), color=color, linestyle=dash, linewidth=1.2)
        size = 2 if series.small else 4
        hollow = series.open or [False] * len(series.xs)
        for is_open in (False, True):
            points = [(x, y) for x, y, o in zip(series.xs, series.ys, hollow) if o == is_open]
            face = "white" if is_open else color
            label = None if is_open else _plain(series.name)
            style = {"linestyle": "", "marker": marker, "markersize": size, "markerfacecolor": face}
            axis.plot(*(zip(*points) if points else ([], [])), color=color, label=label, **style)
        if series.low:
            axis.fill_between(series.xs, series.low, series.high, color=color, alpha=0.15, linewidth=0)
    if panel.diagonal:
        axis.plot(panel.x_range, panel.x_range, color="black", linewidth=0.8, linestyle="--")
    for at, label in panel.marks:
        axis.axvline(at, color="black", linewidth=0.8)
        beside = {"xytext": (-3, 3), "textcoords": "offset points"}  # of the line, and above the axis
        place = {"rotation": 90, "va": "bottom", "ha": "right"}
        axis.annotate(_plain(label), (at, panel.y_range[0]), fontsize=6, **beside, **place)
    if panel.log_x:
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter(ScalarFormatter())
    elif panel.counts:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set(xlim=panel.x_range, ylim=panel.y_range, xlabel=panel.x_label, ylabel=panel.y_label)
    axis.legend(fontsize=5)


def _draw_tree(panel: Tree) -> Figure:
    places = panel.places()
    columns, rows = 1 + max(c for c, _ in places), 1 + max(r for _, r in places)
    figure = Figure(figsize=(1.7 * columns + 0.5, 0.32 * rows + 0.7))
    axis = figure.subplots()
    for node, (x, y) in zip(panel.nodes, places):
        thick = node.kind in ("accepted", "own")
        if node.parent >= 0:
            from_x, from_y = places[node.parent]
            color, width = ("#0072b2", 2.2) if thick else ("#bbbbbb", 0.9)
            axis.plot([from_x, x], [from_y, y], color=color, linewidth=width, zorder=1)
        sign = {"accepted": "✓ ", "own": "+ "}.get(node.kind, "")
        words = _plain(f"{sign}{node.text[:16]} {node.share}".rstrip())
        box = {
            "boxstyle": "round,pad=0.25",
            "facecolor": BOXES[node.kind],
            "edgecolor": "#0072b2" if thick else "#999999",
        }
        axis.text(x, y, words, fontsize=7, ha="center", va="center", bbox=box, zorder=2)
    axis.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.4, -0.6), title=_plain(panel.title))
    axis.title.set_fontsize(8)
    axis.set_axis_off()
    return figure
