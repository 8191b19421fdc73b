"""Draw one iteration of a trace: the drafted tree, the path that the target accepted, the tokens emitted.

python -m studies.draft_verify docs/results/raw/trace.json --out docs/draft_verify.svg
"""

import argparse
import math
from pathlib import Path
from xml.sax.saxutils import escape

from drafttrain.report.trace import Iteration, Trace
from drafttrain.utils.errors import UserError

COLUMN, ROW, BOX_WIDTH, BOX_HEIGHT = 170, 46, 92, 30
LEFT, TOP = 24, 92
ACCEPTED, REJECTED, TARGET = "#1a7f37", "#8c959f", "#0969da"


def rows_of(iteration: Iteration) -> list[float]:
    """Return the vertical position of each node in rows: leaves in order, a parent in line with its first
    child, so that the tree reads from left to right."""
    children: list[list[int]] = [[] for _ in iteration.tokens]
    for node, parent in enumerate(iteration.parents):
        if parent >= 0:
            children[parent].append(node)
    positions = [0.0] * len(children)
    leaves = 0

    def place(node: int) -> None:
        nonlocal leaves
        if not children[node]:
            positions[node] = leaves
            leaves += 1
            return
        for child in children[node]:
            place(child)
        positions[node] = positions[children[node][0]]

    place(0)
    return positions


def box(x: float, y: float, text: str, colour: str, filled: bool) -> str:
    """Return a token's box with its left edge at x, centred on y."""
    fill, ink = (colour, "#ffffff") if filled else ("#ffffff", "#57606a")
    label = escape(text.strip() or repr(text))
    return (
        f'<rect x="{x}" y="{y - BOX_HEIGHT / 2}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="7" '
        f'fill="{fill}" stroke="{colour}"/>'
        f'<text x="{x + BOX_WIDTH / 2}" y="{y + 5}" style="fill:{ink};text-anchor:middle">{label}</text>'
    )


def tree(iteration: Iteration, at: list[tuple[float, float]]) -> list[str]:
    """Return the edges, with the drafter's probabilities, and the boxes of the drafted tree."""
    parts = []
    for node, parent in enumerate(iteration.parents):
        if parent < 0:
            continue
        (x0, y0), (x1, y1) = at[parent], at[node]
        colour = ACCEPTED if node in iteration.path else REJECTED
        parts.append(
            f'<path d="M{x0 + BOX_WIDTH} {y0} h22 V{y1} H{x1}" fill="none" stroke="{colour}"/>'
            f'<text x="{x1 - 6}" y="{y1 - 6}" text-anchor="end" class="p">'
            f"{math.exp(iteration.log_probs[node]):.0%}</text>"
        )
    for node, (x, y) in enumerate(at):
        accepted = node in iteration.path
        parts.append(box(x, y, iteration.texts[node], ACCEPTED if accepted else REJECTED, accepted))
    return parts


def captions(iteration: Iteration, bottom: float) -> list[str]:
    """Return the lines above the tree and, from `bottom` on, those below it."""
    target_column = LEFT + 2 * COLUMN - 40
    lines = [
        (LEFT, 28, "b", "Propose"),
        (LEFT, 48, "", f"the drafter grows a tree of {len(iteration.tokens) - 1} tokens"),
        (target_column, 28, "b", "Verify"),
        (target_column, 48, "", "one forward of the target over the whole tree"),
        (LEFT, bottom + 4, "", f"{len(iteration.emitted)} tokens from one forward:"),
    ]
    pieces = " ".join(
        f'<tspan fill="{ACCEPTED if i < iteration.drafted else TARGET}">{escape(piece.strip())}</tspan>'
        for i, piece in enumerate(iteration.pieces)
    )
    legend = (
        f'<tspan fill="{ACCEPTED}">green</tspan>: accepted drafts, '
        f'<tspan fill="{TARGET}">blue</tspan>: the target\'s own token, grey: rejected'
    )
    lines += [(LEFT + 196, bottom + 4, "b", pieces), (LEFT, bottom + 26, "", legend)]
    return [f'<text x="{x}" y="{y}" class="{kind}">{text}</text>' for x, y, kind, text in lines]


def draw(trace: Trace, number: int) -> str:
    """Return the SVG of one iteration.

    Raises:
        UserError: the trace has no such iteration, or it drafted nothing.
    """
    last = len(trace.iterations) - 1
    if not 0 < number <= last or len(trace.iterations[number].tokens) < 2:
        raise UserError(f"--iteration: must be one that drafts (1 to {last}), got {number}")
    iteration = trace.iterations[number]
    rows = rows_of(iteration)
    at = [(LEFT + COLUMN * depth, TOP + ROW * row) for depth, row in zip(iteration.depths, rows, strict=True)]
    x, y = at[iteration.path[-1]]
    after = LEFT + COLUMN * (max(iteration.depths) + 1)
    bottom = TOP + ROW * (max(rows) + 1)
    parts = [
        *tree(iteration, at),
        f'<path d="M{x + BOX_WIDTH} {y} H{after}" fill="none" stroke="{TARGET}"/>',
        box(after, y, iteration.pieces[-1], TARGET, filled=True),
        *captions(iteration, bottom),
    ]
    width, height = after + BOX_WIDTH + LEFT, bottom + 42
    style = "text{font:14px sans-serif;fill:#57606a}.b{font-weight:bold}.p{font-size:11px}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-label="One iteration of drafting and verifying">'
        f"<style>{style}</style>"
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>{"".join(parts)}</svg>\n'
    )


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", type=Path, help="file of a trace")
    parser.add_argument("--iteration", type=int, default=1, help="which one (default: 1)")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(draw(Trace.load(args.trace), args.iteration))


if __name__ == "__main__":
    main()
