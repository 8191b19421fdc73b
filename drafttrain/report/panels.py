"""The content of a page: sections of figures, tables and text. `svg.py` and the template decide the look."""

from collections.abc import Sequence
from dataclasses import dataclass, field

FEW = 20  # judged tokens below which a share is drawn hollow


@dataclass
class Bar:
    """One bar.

    Attributes:
        label: its name.
        value: its length.
        text: the value in words, as short as possible.
        note: everything about it, in one line.
        kind: "best", "plain", "baseline" (which others are compared with) or "bad".
        low, high: interval around the value; None for none.
        ceiling: the largest value that is possible; None if unknown.
        flags: numbers of the warnings below the panel.
        parts: kind and length of the pieces that it consists of; empty for one piece.
    """

    label: str
    value: float
    text: str
    note: str = ""
    kind: str = "plain"
    low: float | None = None
    high: float | None = None
    ceiling: float | None = None
    flags: list[int] = field(default_factory=list)
    parts: list[tuple[str, float]] = field(default_factory=list)


@dataclass
class Bars:
    """Horizontal bars from 0 on, from top to bottom.

    Attributes:
        axis: quantity that their length shows.
        reference: position of a line, such as 1 for a ratio; `reference_label` names it.
    """

    title: str
    bars: list[Bar]
    axis: str
    reference: float | None = None
    reference_label: str = ""

    @property
    def description(self) -> str:
        """Return the figure in words, for screen readers."""
        return ", ".join(f"{bar.label} {bar.text}" for bar in self.bars)


@dataclass
class Series:
    """Points that belong together.

    Attributes:
        name: in the legend.
        style: number of its color and marker.
        xs, ys: coordinates.
        notes: one line on each point; empty for a line without points.
        line: whether the points are joined.
        front: other coordinates to join by a line, such as a Pareto front.
        low, high: band around the points; empty for none.
        open: whether a point is based on few tokens and drawn hollow; empty for none.
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
        x_label, y_label: of the axes, with units.
        x_range, y_range: ends of the axes.
        log_x: whether the x axis is logarithmic.
        diagonal: whether to draw y = x.
        marks: vertical lines at x with a label.
        percent: whether y is a share.
        counts: whether x counts something, so that its ticks are whole numbers.
        legend: whether the names of the series are below the chart, and not in the section's legend.
    """

    title: str
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

    @property
    def description(self) -> str:
        """Return the figure in words, for screen readers."""
        ends = (
            f"{s.name}: {s.ys[0]:.3g} at {s.xs[0]:g} to {s.ys[-1]:.3g} at {s.xs[-1]:g}"
            for s in self.series
            if s.xs
        )
        return f"{self.y_label} by {self.x_label}; {'; '.join(ends)}"


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
    nodes: list[Node]

    @property
    def description(self) -> str:
        """Return the figure in words, for screen readers."""
        return "accepted: " + " ".join(node.text for node in self.nodes if node.kind == "accepted")

    def places(self) -> list[tuple[int, float]]:
        """Return column (depth) and row of each node; a parent is centered on its children."""
        children: list[list[int]] = [[] for _ in self.nodes]
        columns, rows, next_row = [0] * len(self.nodes), [0.0] * len(self.nodes), 0.0
        for i, node in enumerate(self.nodes):
            if node.parent >= 0:
                children[node.parent].append(i)
                columns[i] = columns[node.parent] + 1

        def place(i: int) -> None:
            nonlocal next_row
            for child in children[i]:
                place(child)
            if children[i]:
                rows[i] = (rows[children[i][0]] + rows[children[i][-1]]) / 2
            else:
                rows[i], next_row = next_row, next_row + 1

        if self.nodes:
            place(0)
        return list(zip(columns, rows))


Panel = Bars | Chart | Tree


@dataclass
class Table:
    """Numbers as text; the first column names the rows, `notes` are the numbered warnings of cells."""

    title: str
    head: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)


@dataclass
class Span:
    """A piece of a text that is colored by iteration.

    Attributes:
        text: of the drafted tokens.
        own: of the target's own token after them.
        iteration: number of the target forward that emitted it; 0 is the prompt's.
        note: one line on it.
    """

    text: str
    own: str
    iteration: int
    note: str


@dataclass
class Section:
    """A part of the page. The template has its title, its explanation, and the command for missing data.

    Attributes:
        name: for links, the template, and the file names of pictures.
        words: paragraphs before the figures.
        panels: figures of one kind, next to each other.
        pairs: whether every two of them belong together.
        legend: of all panels: name, style of a series or kind of a bar, and whether a series is a line.
        notes: paragraphs after the figures: reasons for distrust.
        tables: the numbers.
        quote: the prompt of the text.
        text: a text, piece by piece.
    """

    name: str
    words: list[str] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)
    pairs: bool = False
    legend: list[tuple[str, int | str, bool]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    quote: str | None = None
    text: list[Span] = field(default_factory=list)

    @property
    def is_missing(self) -> bool:
        """Return True if there is no raw data for it."""
        return not (self.panels or self.tables or self.text)


def span(values: Sequence[float], floor: float | None = None, air: float = 0.06) -> tuple[float, float]:
    """Return the ends of an axis that shows all values with some margin; it begins at `floor`, if given."""
    low = min(values) if floor is None else floor
    high = max(values)
    gap = (high - low or abs(high) or 1.0) * air
    return (low - gap if floor is None else floor, high + gap)
