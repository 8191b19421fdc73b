"""Draw timelines as SVG: lanes of blocks, one color for each sequence, and lanes of levels over time."""

from dataclasses import dataclass, field

from markupsafe import Markup

from drafttrain.report.pictures import colors
from drafttrain.report.svg import tag, text, ticks

WIDTH, LEFT, RIGHT = 920.0, 100.0, 16.0  # of the picture, its names and its margin
LANE, LEVELS, GAP = 20.0, 36.0, 5.0  # heights of lanes of blocks, of levels, and between them
TITLE, AXIS = 26.0, 30.0
SEQUENCES = 3  # colors
KINDS = {
    "verify": "verified by the target",
    "draft": "drafted",
    "wait": "waits for the target",
    "prefill": "its prompt",
}
STYLE = """
text {{ fill: {ink}; font: 12px system-ui, sans-serif; }} .title {{ font-weight: 600; font-size: 13px; }}
.tick {{ fill: {soft}; font-size: 11px; }} .grid {{ stroke: {grid}; }} .paper {{ fill: {paper}; }}
.s0 {{ fill: {c0}; }} .s1 {{ fill: {c1}; }} .s2 {{ fill: {c2}; }} .level {{ fill: {c0}; }}
.draft {{ opacity: .4; }} .wait {{ opacity: .6; }} .prefill {{ fill: {base}; }} .any {{ fill: {ink}; }}
.lane {{ fill: {card}; }}
"""


@dataclass(frozen=True)
class Block:
    """Work on sequences between two times, in seconds; kind is "verify", "draft", "prefill" or "wait"."""

    begin: float
    end: float
    kind: str
    sequences: tuple[int, ...]


@dataclass
class Lane:
    """A line of blocks, or of levels.

    Attributes:
        levels: times in seconds and the level from each of them on, as a share of the lane's height.
        note: below the name, where there are levels.
    """

    name: str
    blocks: list[Block] = field(default_factory=list)
    levels: list[tuple[float, float]] = field(default_factory=list)
    note: str = ""

    @property
    def height(self) -> float:
        """Return the height in the picture."""
        return LEVELS if self.levels else LANE


@dataclass
class Panel:
    """Lanes with an axis of time from `begin` to `end`, in seconds."""

    title: str
    lanes: list[Lane]
    end: float
    begin: float = 0.0


def draw(panels: list[Panel]) -> str:
    """Return panels below each other as an SVG document."""
    y, parts = 8.0, []
    for panel in panels:
        parts += _panel(panel, y)
        y += TITLE + sum(lane.height + GAP for lane in panel.lanes) + AXIS
    kinds = {block.kind for panel in panels for lane in panel.lanes for block in lane.blocks}
    if kinds:
        parts += _legend(kinds, y + 4)
        y += 24
    inks = {name.removeprefix("--"): value for name, value in colors().items()}
    return str(
        tag(
            "svg",
            tag("style", Markup(STYLE.format(**inks))),
            tag("rect", width=WIDTH, height=y, class_="paper"),
            *parts,
            xmlns="http://www.w3.org/2000/svg",
            width=WIDTH,
            height=y,
            viewBox=f"0 0 {WIDTH:.0f} {y:.0f}",
        )
    )


def _panel(panel: Panel, y: float) -> list[Markup]:
    scale = (WIDTH - LEFT - RIGHT) / (panel.end - panel.begin)

    def x(seconds: float) -> float:
        return LEFT + (min(max(seconds, panel.begin), panel.end) - panel.begin) * scale

    top, parts = y + TITLE, [text(8, y + 14, panel.title, class_="title")]
    bottom = top + sum(lane.height + GAP for lane in panel.lanes)
    for tick in ticks(panel.begin, panel.end, 10):
        parts.append(tag("line", x1=x(tick), x2=x(tick), y1=top - 2, y2=bottom, class_="grid"))
        parts.append(text(x(tick), bottom + 13, f"{tick:g} s", "middle", "tick"))
    for lane in panel.lanes:
        middle = top + lane.height / 2 + 4
        parts.append(text(LEFT - 8, middle - 7 * bool(lane.note), lane.name, "end"))
        parts.append(text(LEFT - 8, middle + 8, lane.note, "end", "tick"))
        width = WIDTH - LEFT - RIGHT
        parts.append(tag("rect", x=LEFT, y=top, width=width, height=lane.height, class_="lane"))
        parts += [
            _block(block, x, top)
            for block in lane.blocks
            if block.end > panel.begin and block.begin < panel.end
        ]
        if lane.levels:
            parts.append(_levels(lane, x, top, panel.end))
        top += lane.height + GAP
    return parts


def _block(block: Block, x, top: float) -> Markup:
    """Return a block, with a stripe for each of its sequences."""
    left, width = x(block.begin), max(x(block.end) - x(block.begin) - 0.6, 0.3)
    height = (4.0 if block.kind == "wait" else LANE) / len(block.sequences)
    top += (LANE - height * len(block.sequences)) / 2
    stripes = [
        tag("rect", x=left, y=top + i * height, width=width, height=height, class_=_class(block.kind, number))
        for i, number in enumerate(block.sequences)
    ]
    return stripes[0] if len(stripes) == 1 else tag("g", *stripes)


def _class(kind: str, sequence: int) -> str:
    return kind if kind == "prefill" else f"s{sequence % SEQUENCES} {kind}"


def _levels(lane: Lane, x, top: float, end: float) -> Markup:
    base, (times, levels) = top + lane.height, zip(*lane.levels)
    path = f"M{x(times[0]):.1f} {base:.1f}"
    for level, after in zip(levels, [*times[1:], end]):
        path += f"V{base - level * (lane.height - 2):.1f}H{x(after):.1f}"
    return tag("path", d=f"{path}V{base:.1f}Z", class_="level")


def _legend(kinds: set[str], y: float) -> list[Markup]:
    entries = [(f"sequence {i + 1}", _class("verify", i)) for i in range(SEQUENCES)]
    looks = {kind: kind if kind == "prefill" else f"any {kind}" for kind in KINDS}
    entries += [(words, looks[kind]) for kind, words in KINDS.items() if kind in kinds]
    x, parts = LEFT, []
    for words, look in entries:
        thin = "wait" in look
        parts.append(tag("rect", x=x, y=y + 5 * thin, width=18, height=4 if thin else 14, class_=look))
        parts.append(text(x + 24, y + 11, words))
        x += 38 + 6.2 * len(words)
    return parts
