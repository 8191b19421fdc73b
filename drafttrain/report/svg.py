"""Panels as inline SVG: no script, no font, nothing to fetch. Colors are classes that the page's style sheet
defines, so that they follow light and dark.

Panels are drawn 360 units wide, about a phone's width, and the page puts them beside each other where there
is room: text is as large everywhere. Only trees may be wider; they scroll in a box of their own.
"""

import math
from collections.abc import Callable, Iterable, Sequence

from markupsafe import Markup

from drafttrain.report.panels import Bars, Chart, Node, Panel, Series, Tree

WIDTH = 360
LETTER, BOLD = 6.6, 7.2  # widths of letters of labels and of values, rather too much than too little
LABEL = 40  # letters of a bar's label in one line
MARKERS = ("circle", "square", "triangle", "diamond", "down", "cross", "plus")
DASHES = ("", "6 3", "2 3", "8 3 2 3")
COLORS = 7
Drawn = tuple[float, float, list[Markup]]  # width, height, elements


def draw(panel: Panel, number: int) -> Markup:
    """The panel as an SVG element; its number tells it from the others of the page."""
    wide = isinstance(panel, Tree)
    kinds = {Bars: _bars, Chart: _chart, Tree: _tree}
    width, height, parts = kinds[type(panel)](panel)
    names = [
        tag("title", [panel.title], id=f"title-{number}"),
        tag("desc", [panel.description], id=f"desc-{number}"),
    ]
    return tag(
        "svg",
        names + parts,
        viewBox=f"0 0 {_number(width)} {_number(height)}",
        role="img",
        aria_labelledby=f"title-{number} desc-{number}",
        width=width if wide else None,
        height=height if wide else None,
    )


def tag(name: str, children: Iterable[Markup | str] = (), **attributes: object) -> Markup:
    """An element; `class_` and the like lose their underscore, others turn into hyphens. Text is escaped."""
    pairs = (
        Markup(' {}="{}"').format(key.rstrip("_").replace("_", "-"), _number(value))
        for key, value in attributes.items()
        if value is not None
    )
    inner = Markup("").join(children)
    return Markup("<{0}{1}>{2}</{0}>").format(Markup(name), Markup("").join(pairs), inner)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers at equal distances (1, 2 or 5 times a power of ten) within a range."""
    if high <= low:
        return [low]
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(step * i, 10) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def swatch(style: int, line: bool = True) -> Markup:
    """The line and marker of a series, for a legend."""
    inner = [_marker(style, 14, 7, 4)]
    if line:
        inner.insert(0, tag("line", x1=1, y1=7, x2=27, y2=7, class_="line", stroke_dasharray=_dash(style)))
    return tag(
        "svg", inner, class_=f"swatch c{style % COLORS}", viewBox="0 0 28 14", width=28, height=14,
        aria_hidden="true",
    )  # fmt: skip


def _number(value: object) -> object:
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else value


def _text(x: float, y: float, words: str, anchor: str = "start", class_: str | None = None) -> Markup:
    return tag("text", [words], x=x, y=y, text_anchor=anchor, class_=class_)


def _wrapped(label: str) -> list[str]:
    """A label in lines of at most `LABEL` letters, cut behind commas where it can be."""
    lines = [""]
    for part in label.replace(",", ",\0").split("\0"):
        if lines[-1] and len(lines[-1]) + len(part) > LABEL:
            lines.append("")
        lines[-1] += part
    return [line if len(line) <= LABEL else line[: LABEL - 1] + "…" for line in lines]


def _bars(panel: Bars) -> Drawn:
    left, right, top = 4.0, WIDTH - 8.0, 22.0
    numbers = [n for b in panel.bars for n in (b.value, b.high, b.ceiling, panel.reference) if n is not None]
    most = max(numbers) * 1.03
    parts: list[Markup] = []

    def x(value: float) -> float:
        return left + (right - left) * value / most

    y = top
    rows: list[Markup] = []
    for bar in panel.bars:
        lines = _wrapped(bar.label)
        value = bar.text + "".join(f" ⚑{n}" for n in bar.flags)
        label = [_text(left, y + 11 + 14 * i, line, class_="label") for i, line in enumerate(lines)]
        below = LETTER * len(lines[0]) + BOLD * len(value) > right - left  # it would cover the label
        label.append(_text(right, y + 11 + 14 * len(lines) * below, value, "end", "value"))
        y += 14 * (len(lines) + below) + 3
        shapes = [tag("rect", x=left, y=y, width=x(bar.value) - left, height=11.0, class_=f"bar {bar.kind}")]
        if bar.low is not None and bar.high is not None:
            ends = f"M{x(bar.low):.1f} {y + 2.5:.1f}v6m0-3H{x(bar.high):.1f}m0-3v6"
            shapes.append(tag("path", d=ends, class_="whisker"))
        if bar.ceiling is not None:
            shapes.append(tag("path", d=f"M{x(bar.ceiling):.1f} {y - 1:.1f}v13", class_="ceiling"))
        rows.append(tag("g", [tag("title", [bar.note]), *label, *shapes], class_="row"))
        y += 20
    bottom = y
    for tick in ticks(0, most, 5):
        grid = tag("line", x1=x(tick), x2=x(tick), y1=top, y2=bottom - 4, class_="grid")
        parts += [grid, _text(x(tick), bottom + 9, f"{tick:g}", "start" if not tick else "middle", "tick")]
    if panel.reference is not None:
        at = x(panel.reference)
        parts.append(tag("line", x1=at, x2=at, y1=top - 6, y2=bottom - 4, class_="reference"))
        parts.append(_text(at, top - 9, panel.reference_label, "middle", "tick"))
    parts += [*rows, _text(right, bottom + 24, panel.axis, "end", "tick")]
    return WIDTH, bottom + 30, parts


def _chart(panel: Chart) -> Drawn:
    left, right, top, bottom = 42.0, WIDTH - 10.0, 24.0, 206.0

    def scale(value: float) -> float:
        return math.log2(value) if panel.log_x else value

    (x0, x1), (y0, y1) = map(scale, panel.x_range), panel.y_range

    def x(value: float) -> float:
        return left + (right - left) * (scale(value) - x0) / (x1 - x0)

    def y(value: float) -> float:
        return bottom - (bottom - top) * (min(max(value, y0), y1) - y0) / (y1 - y0)

    parts: list[Markup] = []
    for tick in ticks(y0, y1, 5):
        words = f"{100 * tick:.0f} %" if panel.percent else f"{tick:g}"
        parts.append(tag("line", x1=left, x2=right, y1=y(tick), y2=y(tick), class_="grid"))
        parts.append(_text(left - 5, y(tick) + 4, words, "end", "tick"))
    if panel.log_x:
        across = [2.0**i for i in range(math.ceil(x0 - 1e-9), math.floor(x1 + 1e-9) + 1)]
    else:
        across = ticks(*panel.x_range, 6)
    if panel.counts:
        across = [tick for tick in across if tick == int(tick)]
    for tick in across:
        parts.append(tag("line", x1=x(tick), x2=x(tick), y1=top, y2=bottom, class_="grid faint"))
        parts.append(_text(x(tick), bottom + 14, _short(tick), "middle", "tick"))
    if panel.diagonal:
        low, high = max(panel.x_range[0], y0), min(panel.x_range[1], y1)
        parts.append(
            tag(
                "line",
                x1=x(low),
                y1=y(low),
                x2=x(high),
                y2=y(high),
                class_="reference",
                stroke_dasharray="4 3",
            )
        )
    for i, (at, label) in enumerate(panel.marks):
        on_right = x(at) > (left + right) / 2
        parts.append(tag("line", x1=x(at), x2=x(at), y1=top, y2=bottom, class_="reference"))
        anchor, shift = ("end", -4) if on_right else ("start", 4)
        parts.append(_text(x(at) + shift, bottom - 8 - 14 * i, label, anchor, "mark"))
    parts += [_series(series, x, y) for series in panel.series]
    parts.append(_text((left + right) / 2, bottom + 30, panel.x_label, "middle", "tick"))
    parts.append(_text(2, 12, panel.y_label, "start", "tick"))
    return WIDTH, bottom + 38, parts


def _short(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 10_000 else f"{value:g}"


def _series(series: Series, x: Callable[[float], float], y: Callable[[float], float]) -> Markup:
    parts: list[Markup] = []
    if series.low:
        there = [f"{x(a):.1f} {y(b):.1f}" for a, b in zip(series.xs, series.low)]
        back = [f"{x(a):.1f} {y(b):.1f}" for a, b in zip(series.xs, series.high)]
        parts.append(tag("path", d="M" + "L".join(there + back[::-1]) + "Z", class_="band"))
    joined: Sequence[tuple[float, float]] = series.front or (
        list(zip(series.xs, series.ys)) if series.line else []
    )
    if len(joined) > 1:
        steps = "L".join(f"{x(a):.1f} {y(b):.1f}" for a, b in joined)
        parts.append(tag("path", d="M" + steps, class_="line", stroke_dasharray=_dash(series.style)))
    radius = 2.2 if series.small else 4
    hollow = series.open or [False] * len(series.xs)
    for a, b, note, is_open in zip(series.xs, series.ys, series.notes, hollow):
        mark = _marker(series.style, x(a), y(b), radius, is_open)
        parts.append(tag("g", [tag("title", [note]), mark]))
    return tag("g", parts, class_=f"c{series.style % COLORS}")


def _dash(style: int) -> str | None:
    """A line's dashes, so that color alone tells nothing; others when the colors begin anew."""
    return DASHES[(style + 2 * (style // COLORS)) % len(DASHES)] or None


def _marker(style: int, x: float, y: float, r: float, is_open: bool = False) -> Markup:
    shape = MARKERS[(style + style // COLORS) % len(MARKERS)]
    class_ = "marker open" if is_open else "marker"
    if shape == "circle":
        return tag("circle", cx=x, cy=y, r=r, class_=class_)
    paths = {
        "square": f"M{x - r:.1f} {y - r:.1f}h{2 * r}v{2 * r}h-{2 * r}z",
        "triangle": f"M{x:.1f} {y - r * 1.2:.1f}l{r * 1.2:.1f} {r * 2.1:.1f}h-{r * 2.4:.1f}z",
        "diamond": f"M{x:.1f} {y - r * 1.4:.1f}l{r * 1.4:.1f} {r * 1.4:.1f}l-{r * 1.4:.1f} {r * 1.4:.1f}"
        f"l-{r * 1.4:.1f}-{r * 1.4:.1f}z",
        "down": f"M{x:.1f} {y + r * 1.2:.1f}l{r * 1.2:.1f}-{r * 2.1:.1f}h-{r * 2.4:.1f}z",
        "cross": f"M{x - r:.1f} {y - r:.1f}l{2 * r} {2 * r}m0-{2 * r}l-{2 * r} {2 * r}",
        "plus": f"M{x - r * 1.2:.1f} {y:.1f}h{r * 2.4:.1f}M{x:.1f} {y - r * 1.2:.1f}v{r * 2.4:.1f}",
    }
    return tag("path", d=paths[shape], class_=f"{class_} stroke" if shape in ("cross", "plus") else class_)


def _tree(panel: Tree) -> Drawn:
    row, gap, pad, head = 26.0, 30.0, 7.0, 18.0
    places = panel.places()
    columns = 1 + max(column for column, _ in places)
    widths = [
        max(_node_width(node) for node, (column, _) in zip(panel.nodes, places) if column == c)
        for c in range(columns)
    ]
    starts = [2 + sum(widths[:c]) + gap * c for c in range(columns)]
    height = head + row * (1 + max(at for _, at in places)) + 4

    def middle(i: int) -> float:
        return head + row * places[i][1] + row / 2

    parts = [
        _text(starts[c] + widths[c] / 2, 11, "root" if not c else f"depth {c}", "middle", "tick")
        for c in range(columns)
    ]
    boxes = []
    for i, node in enumerate(panel.nodes):
        column, at = places[i][0], middle(i)
        if node.parent >= 0:
            x1, y1 = starts[column - 1] + _node_width(panel.nodes[node.parent]), middle(node.parent)
            bend = starts[column] - gap / 2
            edge = f"M{x1:.1f} {y1:.1f}C{bend:.1f} {y1:.1f} {bend:.1f} {at:.1f} {starts[column]:.1f} {at:.1f}"
            parts.append(tag("path", d=edge, class_=f"edge {node.kind}"))
        width = _node_width(node)
        inner = [
            tag("title", [node.note]),
            tag("rect", x=starts[column], y=at - 10, width=width, height=20.0, rx=5, class_="box"),
            _text(starts[column] + pad, at + 4, _shown(node), class_="token"),
        ]
        if node.share:
            inner.append(_text(starts[column] + width - pad, at + 4, node.share, "end", "tick"))
        boxes.append(tag("g", inner, class_=f"node {node.kind}"))
    full = starts[-1] + widths[-1] + 2
    return full, height, parts + boxes


SIGNS = {"accepted": "✓ ", "own": "+ ", "root": "", "refused": ""}


def _shown(node: Node) -> str:
    text = node.text if len(node.text) <= 16 else node.text[:15] + "…"
    return SIGNS[node.kind] + text


def _node_width(node: Node) -> float:
    letters = len(_shown(node)) + (len(node.share) * 0.9 + 1.2 if node.share else 0)
    return 14 + 7.2 * letters
