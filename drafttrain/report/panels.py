"""What a figure shows, apart from how it is drawn: `svg.py` draws it for the page, `png.py` for papers."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class Bar:
    """One bar.

    Attributes:
        label: beside it.
        value: its length; `text` tells it.
        text: value in words, as short as can be.
        low, high: interval around the value; None for none.
        ceiling: what the value could reach at most; None where nothing is known.
        kind: "best", "plain", "baseline" (what others are compared with) or "bad".
        note: everything about it, in one line.
        flags: numbers of the warnings below the panel.
    """

    label: str
    value: float
    text: str
    low: float | None = None
    high: float | None = None
    ceiling: float | None = None
    kind: str = "plain"
    note: str = ""
    flags: list[int] = field(default_factory=list)


@dataclass
class Bars:
    """Horizontal bars from 0 on.

    Attributes:
        title, description: for readers with and without eyes.
        bars: from top to bottom.
        axis: what their length is.
        reference: where a line stands, such as 1 for a ratio.
        reference_label: what it is.
    """

    title: str
    description: str
    bars: list[Bar]
    axis: str
    reference: float | None = None
    reference_label: str = ""


@dataclass
class Series:
    """Points that belong together.

    Attributes:
        name: in the legend.
        style: number of its color and marker.
        xs, ys: coordinates.
        notes: of each point, in one line.
        line: whether the points are joined.
        front: further coordinates that are joined by a line, such as a Pareto front.
        low, high: band around the points; empty for none.
        open: points that rest on little, drawn hollow.
        small: whether there are too many points for large markers.
    """

    name: str
    style: int
    xs: list[float]
    ys: list[float]
    notes: list[str]
    line: bool = True
    front: list[tuple[float, float]] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)
    open: list[bool] = field(default_factory=list)
    small: bool = False


@dataclass
class Chart:
    """Lines and points over two axes.

    Attributes:
        title, description: for readers with and without eyes.
        x_label, y_label: of the axes, with units.
        x_range, y_range: ends of the axes.
        log_x: whether the x axis is logarithmic, to base 2.
        diagonal: whether to draw y = x.
        marks: vertical lines at x with a label.
        percent: whether y is a share.
        legend: whether it has a legend of its own, not the section's.
        counts: whether x counts, so that its ticks are whole numbers.
    """

    title: str
    description: str
    series: list[Series]
    x_label: str
    y_label: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    log_x: bool = False
    diagonal: bool = False
    marks: list[tuple[float, str]] = field(default_factory=list)
    percent: bool = False
    counts: bool = False
    legend: bool = False


@dataclass
class Node:
    """A node of a drawn tree.

    Attributes:
        text: its token.
        parent: its parent's number; -1 for the root.
        share: probability in percent, as text; empty where there is none.
        kind: "root", "accepted", "refused" or "own" (the target's token after the accepted path).
        note: everything about it, in one line.
    """

    text: str
    parent: int
    share: str
    kind: str
    note: str


@dataclass
class Tree:
    """A tree of tokens, parents before their children."""

    title: str
    description: str
    nodes: list[Node]

    def places(self) -> list[tuple[int, float]]:
        """Column (depth) and row of each node: leaves below each other, parents amid their children."""
        children: dict[int, list[int]] = {}
        for i, node in enumerate(self.nodes):
            children.setdefault(node.parent, []).append(i)
        columns = [0] * len(self.nodes)
        for i, node in enumerate(self.nodes):
            columns[i] = 0 if node.parent < 0 else columns[node.parent] + 1
        rows = [0.0] * len(self.nodes)
        next_row = 0.0

        def place(i: int) -> None:
            nonlocal next_row
            below = children.get(i, [])
            for child in below:
                place(child)
            if below:
                rows[i] = (rows[below[0]] + rows[below[-1]]) / 2
            else:
                rows[i], next_row = next_row, next_row + 1

        if self.nodes:
            place(0)
        return list(zip(columns, rows))


Panel = Bars | Chart | Tree


def span(values: Sequence[float], floor: float | None = None, air: float = 0.06) -> tuple[float, float]:
    """Ends of an axis that shows all values with some air; `floor` is where it begins, if given."""
    low = min(values) if floor is None else floor
    high = max(values)
    gap = (high - low or abs(high) or 1.0) * air
    return (low - gap if floor is None else floor, high + gap)
