"""The sections that a trace gives: trees with their accepted paths, and the text colored by iteration."""

import math

from drafttrain.report.panels import Chart, Node, Series, Tree, span
from drafttrain.report.sections import Section, Span
from drafttrain.report.trace import Iteration, Trace

DRAWN = 40  # nodes of a drawn tree at most
VISIBLE = str.maketrans({"\n": "⏎", "\t": "⇥", " ": "␣"})
MAKE = "`drafttrain report FOLDER --bundle BUNDLE --prompt TEXT --trace trace.json …` makes it."


def tree_section(trace: Trace | None) -> Section:
    """The tree whose accepted path was the longest, and one of a usual step."""
    section = Section("tree", "Trees and what was accepted of them")
    grown = [(i, step) for i, step in enumerate(trace.iterations) if len(step.tokens) > 1] if trace else []
    if not grown:
        section.missing = f"No trace of a prompt with drafts. {MAKE}"
        return section
    ranked = sorted(grown, key=lambda pair: (len(pair[1].path), -len(pair[1].tokens)))
    chosen = {"the longest accepted path": ranked[-1], "a usual step": ranked[len(ranked) // 2]}
    for words, (number, step) in chosen.items():
        section.panels.append(draw_tree(f"{words}: iteration {number}", step))
    tree = f" ({trace.tree})" if trace.tree else ""
    section.words = [
        f"Drafted by {trace.target}'s drafter{tree} in one greedy decoding. Each box is a token with its "
        "probability given its parent. ✓ and thick lines: accepted; + : the target's own token, emitted "
        "behind the path and root of the next tree; all others were refused or not reached. ␣ is a "
        "space, ⏎ a line break."
    ]
    return section


def draw_tree(title: str, step: Iteration) -> Tree:
    """The most probable nodes of a tree, all accepted ones among them."""
    joint = [0.0] * len(step.tokens)
    for i, parent in enumerate(step.parents):
        joint[i] = step.log_probs[i] + (joint[parent] if parent >= 0 else 0.0)
    ranked = sorted(range(len(joint)), key=lambda i: (i not in step.path, -joint[i], i))
    kept = sorted(ranked[:DRAWN])  # parents are as probable as their children at least, and come first
    told = any(step.log_probs)  # drafts from n-grams have no probabilities
    numbers = {node: i for i, node in enumerate(kept)}
    nodes = []
    for i in kept:
        kind = "root" if not i else "accepted" if i in step.path else "refused"
        share = f"{100 * math.exp(step.log_probs[i]):.0f}%" if told and i else ""
        text = step.texts[i].translate(VISIBLE)
        note = f"{text}, token {step.tokens[i]}, depth {step.depths[i]}, {kind}"
        if share:
            note += f", probability {share}, of the whole path {100 * math.exp(joint[i]):.1f}%"
        nodes.append(Node(text, numbers.get(step.parents[i], -1), share, kind, note))
    if len(step.emitted) > step.drafted:
        own = step.pieces[-1].translate(VISIBLE) or "(end)"
        nodes.append(Node(own, numbers[step.path[-1]], "", "own", f"{own}: the target's own token"))
    path = "".join(step.texts[i] for i in step.path[1:])
    left_out = len(step.tokens) - len(kept)
    more = f", {left_out} least probable ones not drawn" if left_out else ""
    title = f"{title}, {len(step.tokens) - 1} drafts{more}, {step.drafted} accepted"
    return Tree(title, f"accepted: {path!r}; emitted {len(step.emitted)} tokens", nodes)


def text_section(trace: Trace | None) -> Section:
    """The output, a color for each target forward, and how many tokens each brought."""
    section = Section("text", "A text, colored by iteration")
    if trace is None or not trace.text:
        section.missing = f"No trace of a prompt. {MAKE}"
        return section
    section.quote = trace.prompt
    tree = f" with {trace.tree}" if trace.tree else ""
    tokens = sum(len(step.emitted) for step in trace.iterations)
    section.words = [
        f"{trace.target}{tree}, greedy, {trace.dtype}: {tokens} tokens in {len(trace.iterations)} target "
        f"forwards, accept_len {trace.accept_len:.2f} (one text; the tables above are the measurement). "
        "Each change of color, with a bar before it, is a new forward; underlined is the target's own token, "
        "the rest was drafted."
    ]
    for number, step in enumerate(trace.iterations):
        pieces, n = step.pieces, len(step.emitted)
        note = f"iteration {number}: {n} token{'s' * (n != 1)}, {step.drafted} drafted"
        section.text.append(
            Span("".join(pieces[: step.drafted]), "".join(pieces[step.drafted :]), number, note)
        )
    steps = trace.iterations[1:]
    if steps:
        section.panels.append(_progress(trace, steps))
    return section


def _progress(trace: Trace, steps: list[Iteration]) -> Chart:
    """Tokens of each iteration by the place in the output where it began."""
    places, at = [], len(trace.iterations[0].emitted)
    for step in steps:
        places.append(float(at))
        at += len(step.emitted)
    counts = [float(len(step.emitted)) for step in steps]
    notes = [
        f"iteration {i}, from token {p:g} on: {c:g} tokens" for i, (p, c) in enumerate(zip(places, counts), 1)
    ]
    series = Series("tokens of an iteration", 0, places, counts, notes, line=False, small=False)
    words = f"{len(steps)} iterations, {min(counts):g} to {max(counts):g} tokens each"
    title = "tokens of each iteration by place in the output"
    x_range = (0.0, max(places) * 1.03 + 1)
    return Chart(title, words, [series], "place in the output", "tokens", x_range, span(counts, 0.0, 0.12))
