"""Panels as SVG: no script, no font, nothing to fetch. Colors are classes of `figures.css`, so that they
follow light and dark on the page; `pictures.py` converts the same drawings to PNG.

Panels are 360 units wide, about a phone's width, and the page puts them beside each other where there is
room: text has the same size everywhere. Only trees may be wider; they scroll in a box of their own.
"""

import math
from collections.abc import Callable

from markupsafe import Markup

from drafttrain.report.panels import Bars, Chart, Node, Panel, Series, Tree

WIDTH = 360
LETTER, BOLD = 6.6, 7.2  # widths of letters of labels and of values, rather too large than too small
LABEL = 40  # letters of a bar's label in one line
MARKERS = ("circle", "square", "triangle", "diamond", "down", "cross", "plus")
DASHES = ("", "6 3", "2 3", "8 3 2 3")
COLORS = 7
MANY_OCTAVES = 10  # of a logarithmic axis from which on its ticks are powers of 10
HATCH = Markup(  # of bars below 1
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path class="hatch" d="M0 3h6"/></pattern></defs>'
)
SIGNS = {"accepted": "✓ ", "own": "+ ", "root": "", "refused": ""}
Drawn = tuple[float, float, list[Markup]]  # width, height, elements


def draw(panel: Panel, number: int) -> Markup:
    """Return the panel as an SVG element; its number makes ids unique on the page."""
    width, height, parts = drawn(panel)
    wide = isinstance(panel, Tree)
    return tag(
        "svg",
        tag("title", panel.title, id=f"title-{number}"),
        tag("desc", panel.description, id=f"desc-{number}"),
        *parts,
        viewBox=f"0 0 {_number(width)} {_number(height)}",
        role="img",
        aria_labelledby=f"title-{number} desc-{number}",
        width=width if wide else None,
        height=height if wide else None,
    )


def drawn(panel: Panel) -> Drawn:
    """Return width, height and elements of a panel."""
    return {Bars: _bars, Chart: _chart, Tree: _tree}[type(panel)](panel)


def tag(name: str, *children: Markup | str, **attributes: object) -> Markup:
    """Return an element; `class_` and the like lose their underscore, others turn into hyphens. Text is
    escaped."""
    pairs = (
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _number(value))
        for key, value in attributes.items()
        if value is not None
    )
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), Markup().join(pairs), Markup().join(children))


def text(x: float, y: float, words: str, anchor: str = "start", class_: str | None = None) -> Markup:
    """Return a line of text."""
    return tag("text", words, x=x, y=y, text_anchor=anchor, class_=class_)


def swatch(style: int | str, line: bool = True) -> Markup:
    """Return the sign of a legend entry as an SVG element."""
    box = {"viewBox": "0 0 28 14", "width": 28, "height": 14, "aria_hidden": "true"}
    return tag("svg", sign(style, line), class_="swatch", **box)


def sign(style: int | str, line: bool = True, **attributes: object) -> Markup:
    """Return the sign of a legend entry: line and marker of a series, or a bar; 28 units wide and 14 high."""
    if isinstance(style, str):
        shapes = {
            "ceiling": tag("path", d="M14 1v12", class_="ceiling"),
            "whisker": tag("path", d="M3 4v6m0-3H25m0-3v6", class_="whisker"),
        }
        bar = tag("rect", x=2, y=2, width=24, height=10, class_=f"bar {style}")
        return tag("g", shapes.get(style, bar), **attributes)
    across = [_line(1, 7, 27, 7, "line", _dash(style))] * line
    return tag("g", *across, _marker(style, 14, 7, 4), class_=f"c{style % COLORS}", **attributes)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Return round numbers at equal distances (1, 2 or 5 times a power of ten) within a range."""
    if high <= low:
        return [low]
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(step * i, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _number(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def _line(x1: float, y1: float, x2: float, y2: float, class_: str, dash: str | None = None) -> Markup:
    return tag("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_, stroke_dasharray=dash)


def _wrapped(label: str) -> list[str]:
    """Return a label in lines of at most `LABEL` letters, broken after commas where possible."""
    lines = [""]
    for part in label.replace(",", ",\0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(part) > LABEL:
            lines.append("")
        lines[-1] += part
    return [line if len(line) <= LABEL else line[: LABEL - 1] + "…" for line in lines]


def _bars(panel: Bars) -> Drawn:
    left, right, top = 4.0, WIDTH - 8.0, 22.0
    numbers = [n for b in panel.bars for n in (b.value, b.high, b.ceiling, panel.reference) if n is not None]
    scale = (right - left) / (max(numbers) * 1.03)
    y, rows = top, []
    for bar in panel.bars:
        lines = _wrapped(bar.label)
        value = bar.text + "".join(f" ⚑{n}" for n in bar.flags)
        shapes = [text(left, y + 11 + 14 * i, line, class_="label") for i, line in enumerate(lines)]
        below = LETTER * len(lines[0]) + BOLD * len(value) > right - left  # it would cover the label
        shapes.append(text(right, y + 11 + 14 * len(lines) * below, value, "end", "value"))
        y += 14 * (len(lines) + below) + 3
        at = left
        for kind, length in bar.parts or [(bar.kind, bar.value)]:
            box = {"x": at, "y": y, "width": length * scale, "height": 11.0}
            shapes.append(tag("rect", **box, class_=f"bar {kind}"))
            at += length * scale
        if bar.low is not None and bar.high is not None:
            low, high = left + bar.low * scale, left + bar.high * scale
            shapes.append(tag("path", d=f"M{low:.1f} {y + 2.5:.1f}v6m0-3H{high:.1f}m0-3v6", class_="whisker"))
        if bar.ceiling is not None:
            at = left + bar.ceiling * scale
            shapes.append(tag("path", d=f"M{at:.1f} {y - 1:.1f}v13", class_="ceiling"))
        rows.append(tag("g", tag("title", bar.note), *shapes, class_="row"))
        y += 20
    parts: list[Markup] = []
    for tick in ticks(0, (right - left) / scale):
        at = left + tick * scale
        parts.append(_line(at, top, at, y - 4, "grid"))
        parts.append(text(at, y + 9, f"{tick:g}", "middle" if tick else "start", "tick"))
    if panel.reference is not None:
        at = left + panel.reference * scale
        parts.append(_line(at, top - 6, at, y - 4, "reference"))
        parts.append(text(at, top - 9, panel.reference_label, "middle", "tick"))
    return WIDTH, y + 30, [*parts, *rows, text(right, y + 24, panel.axis, "end", "tick")]


def _chart(panel: Chart) -> Drawn:
    left, right, top, bottom = 42.0, WIDTH - 10.0, 24.0, 206.0
    scale = math.log2 if panel.log_x else float
    (x0, x1), (y0, y1) = map(scale, panel.x_range), panel.y_range

    def x(value: float) -> float:
        return left + (right - left) * (scale(value) - x0) / ((x1 - x0) or 1.0)  # a single place: at the left

    def y(value: float) -> float:
        return bottom - (bottom - top) * (min(max(value, y0), y1) - y0) / (y1 - y0)

    parts: list[Markup] = []
    for tick in ticks(y0, y1):
        words = f"{100 * tick:.0f} %" if panel.percent else f"{tick:g}"
        parts.append(_line(left, y(tick), right, y(tick), "grid"))
        parts.append(text(left - 5, y(tick) + 4, words, "end", "tick"))
    across = ticks(*panel.x_range, 6)
    if panel.log_x:
        base = 2.0 if x1 - x0 < MANY_OCTAVES else 10.0
        first, last = (math.log(end, base) for end in panel.x_range)
        across = [base**i for i in range(math.ceil(first - 1e-9), math.floor(last + 1e-9) + 1)]
    for tick in across:
        if not panel.counts or tick == int(tick):
            words = f"{tick / 1000:g}k" if tick >= 10_000 else f"{tick:g}"
            parts.append(_line(x(tick), top, x(tick), bottom, "grid faint"))
            parts.append(text(x(tick), bottom + 14, words, "middle", "tick"))
    if panel.diagonal:
        low, high = max(panel.x_range[0], y0), min(panel.x_range[1], y1)
        parts.append(_line(x(low), y(low), x(high), y(high), "reference", "4 3"))
    for i, (at, label) in enumerate(panel.marks):
        anchor, shift = ("end", -4) if x(at) > (left + right) / 2 else ("start", 4)
        parts.append(_line(x(at), top, x(at), bottom, "reference"))
        parts.append(text(x(at) + shift, bottom - 8 - 14 * i, label, anchor, "mark"))
    parts += [_series(series, x, y) for series in panel.series]
    parts.append(text((left + right) / 2, bottom + 30, panel.x_label, "middle", "tick"))
    parts.append(text(2, 12, panel.y_label, class_="tick"))
    end = bottom + 38
    for series in panel.series if panel.legend else ():
        parts.append(sign(series.style, transform=f"translate(4 {_number(end)})"))
        parts.append(text(38, end + 11, series.name))
        end += 16
    return WIDTH, end, parts


def _series(series: Series, x: Callable[[float], float], y: Callable[[float], float]) -> Markup:
    def path(points: list[tuple[float, float]]) -> str:
        return "M" + "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in points)

    parts: list[Markup] = []
    if series.low:
        band = [*zip(series.xs, series.low), *reversed([*zip(series.xs, series.high)])]
        parts.append(tag("path", d=path(band) + "Z", class_="band"))
    joined = series.front or (list(zip(series.xs, series.ys)) if series.line else [])
    if len(joined) > 1:
        parts.append(tag("path", d=path(joined), class_="line", stroke_dasharray=_dash(series.style)))
    radius, hollow = 2.2 if series.small else 4, series.open or [False] * len(series.xs)
    for a, b, note, is_open in zip(series.xs, series.ys, series.notes, hollow):
        parts.append(tag("g", tag("title", note), _marker(series.style, x(a), y(b), radius, is_open)))
    return tag("g", *parts, class_=f"c{series.style % COLORS}")


def _dash(style: int) -> str | None:
    """Return a style's dashes, so that lines never differ in color alone; they change when colors repeat."""
    return DASHES[(style + 2 * (style // COLORS)) % len(DASHES)] or None


def _marker(style: int, x: float, y: float, r: float, is_open: bool = False) -> Markup:
    shape = MARKERS[(style + style // COLORS) % len(MARKERS)]
    class_ = "marker open" if is_open else "marker"
    if shape == "circle":
        return tag("circle", cx=x, cy=y, r=r, class_=class_)
    a, b, c = r * 1.2, r * 2.1, r * 1.4
    paths = {
        "square": f"M{x - r:.1f} {y - r:.1f}h{2 * r}v{2 * r}h-{2 * r}z",
        "triangle": f"M{x:.1f} {y - a:.1f}l{a:.1f} {b:.1f}h-{2 * a:.1f}z",
        "diamond": f"M{x:.1f} {y - c:.1f}l{c:.1f} {c:.1f}l-{c:.1f} {c:.1f}l-{c:.1f}-{c:.1f}z",
        "down": f"M{x:.1f} {y + a:.1f}l{a:.1f}-{b:.1f}h-{2 * a:.1f}z",
        "cross": f"M{x - r:.1f} {y - r:.1f}l{2 * r} {2 * r}m0-{2 * r}l-{2 * r} {2 * r}",
        "plus": f"M{x - a:.1f} {y:.1f}h{2 * a:.1f}M{x:.1f} {y - a:.1f}v{2 * a:.1f}",
    }
    return tag("path", d=paths[shape], class_=f"{class_} stroke" if shape in ("cross", "plus") else class_)


def _tree(panel: Tree) -> Drawn:
    row, gap, pad, head = 26.0, 30.0, 7.0, 18.0
    places, sizes = panel.places(), [_node_width(node) for node in panel.nodes]
    columns = range(1 + max(column for column, _ in places))
    widths = [max(size for size, (column, _) in zip(sizes, places) if column == c) for c in columns]
    starts = [2 + sum(widths[:c]) + gap * c for c in columns]
    names = ["root", *(f"depth {c}" for c in columns[1:])]
    edges = [text(starts[c] + widths[c] / 2, 11, names[c], "middle", "tick") for c in columns]
    middles, boxes = [head + row * at + row / 2 for _, at in places], []
    for node, size, (column, _), at in zip(panel.nodes, sizes, places, middles):
        x = starts[column]
        if node.parent >= 0:
            from_x, from_y = starts[column - 1] + sizes[node.parent], middles[node.parent]
            bend = x - gap / 2
            curve = f"M{from_x:.1f} {from_y:.1f}C{bend:.1f} {from_y:.1f} {bend:.1f} {at:.1f} {x:.1f} {at:.1f}"
            edges.append(tag("path", d=curve, class_=f"edge {node.kind}"))
        inner = [
            tag("title", node.note),
            tag("rect", x=x, y=at - 10, width=size, height=20.0, rx=5, class_="box"),
            text(x + pad, at + 4, _shown(node), class_="token"),
        ]
        if node.share:
            inner.append(text(x + size - pad, at + 4, node.share, "end", "tick"))
        boxes.append(tag("g", *inner, class_=f"node {node.kind}"))
    height = head + row * (1 + max(at for _, at in places)) + 4
    return starts[-1] + widths[-1] + 2, height, edges + boxes


def _shown(node: Node) -> str:
    return SIGNS[node.kind] + (node.text if len(node.text) <= 16 else node.text[:15] + "…")


def _node_width(node: Node) -> float:
    return 14 + 7.2 * (len(_shown(node)) + (len(node.share) * 0.9 + 1.2 if node.share else 0))
