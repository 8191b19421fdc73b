"""What a page consists of: sections of figures, tables and words. How they look is the business of `svg.py`,
`png.py` and the template."""

from dataclasses import dataclass, field

from drafttrain.report.panels import Panel

FEW = 20  # judged tokens below which a share is drawn hollow


@dataclass
class Table:
    """Numbers in words.

    Attributes:
        title: what the rows are of.
        head: of the columns; the first one names the rows.
        rows: cells as text.
        notes: numbered warnings that cells refer to.
    """

    title: str
    head: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)


@dataclass
class Span:
    """A piece of a text that is colored by iteration.

    Attributes:
        text: of the drafted tokens.
        own: of the target's own token behind them.
        iteration: number of the target forward that brought it; 0 is the prompt's.
        note: about it, in one line.
    """

    text: str
    own: str
    iteration: int
    note: str


@dataclass
class Section:
    """A part of the page.

    Attributes:
        name: for links and for the file names of pictures.
        title: heading.
        words: paragraphs before the figures: what is measured.
        panels: figures of one kind, beside each other.
        pairs: whether every two of them belong together.
        legend: style and name of the series that the panels share, and whether they are lines.
        notes: paragraphs after the figures: what to distrust.
        tables: the numbers.
        quote: what the text answers.
        text: a text, piece by piece.
        missing: instead of all that, which command makes the raw data.
    """

    name: str
    title: str
    words: list[str] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)
    pairs: bool = False
    legend: list[tuple[int, str, bool]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    quote: str | None = None
    text: list[Span] = field(default_factory=list)
    missing: str | None = None
