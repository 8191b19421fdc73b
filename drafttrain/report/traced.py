"""The sections from a trace: trees with their accepted paths, and the text colored by iteration."""

import math

from drafttrain.report.panels import Chart, Node, Section, Series, Span, Tree, span
from drafttrain.report.trace import Iteration, Trace

DRAWN = 40  # nodes of a drawn tree at most
VISIBLE = str.maketrans({"\n": "⏎", "\t": "⇥", " ": "␣"})


def tree_section(trace: Trace | None) -> Section:
    """Return the tree whose accepted path was the longest, and one of a usual step."""
    section = Section("tree")
    grown = [(i, step) for i, step in enumerate(trace.iterations) if len(step.tokens) > 1] if trace else []
    if grown:
        ranked = sorted(grown, key=lambda pair: (len(pair[1].path), -len(pair[1].tokens)))
        chosen = {"the longest accepted path": ranked[-1], "a usual step": ranked[len(ranked) // 2]}
        for words, (number, step) in chosen.items():
            section.panels.append(draw_tree(f"{words}: iteration {number}", step))
        policy = f" ({trace.tree})" if trace.tree else ""
        section.words.append(f"Drafted by {trace.target}'s drafter{policy} in one greedy decoding.")
    return section


def draw_tree(title: str, step: Iteration) -> Tree:
    """Return the most probable nodes of a tree, all accepted ones among them."""
    joint = [0.0] * len(step.tokens)
    for i, parent in enumerate(step.parents):
        joint[i] = step.log_probs[i] + (joint[parent] if parent >= 0 else 0.0)
    ranked = sorted(range(len(joint)), key=lambda i: (i not in step.path, -joint[i], i))
    limit = max(DRAWN, len(step.path))
    shown = sorted(ranked[:limit])  # parents are at least as probable as their children, and come first
    has_probabilities = any(step.log_probs)  # drafts from n-grams have none
    numbers = {node: i for i, node in enumerate(shown)}
    nodes = []
    for i in shown:
        kind = "root" if not i else "accepted" if i in step.path else "refused"
        share = f"{100 * math.exp(step.log_probs[i]):.0f}%" if has_probabilities and i else ""
        text = step.texts[i].translate(VISIBLE)
        note = f"{text}, token {step.tokens[i]}, depth {step.depths[i]}, {kind}"
        if share:
            note += f", probability {share}, of the whole path {100 * math.exp(joint[i]):.1f}%"
        nodes.append(Node(text, numbers.get(step.parents[i], -1), share, kind, note))
    if len(step.emitted) > step.drafted:
        own = step.pieces[-1].translate(VISIBLE) or "(end)"
        nodes.append(Node(own, numbers[step.path[-1]], "", "own", f"{own}: the target's own token"))
    left_out = len(step.tokens) - len(shown)
    more = f", {left_out} least probable ones not drawn" if left_out else ""
    return Tree(f"{title}, {len(step.tokens) - 1} drafts{more}, {step.drafted} accepted", nodes)


def text_section(trace: Trace | None) -> Section:
    """Return the output, a color for each target forward, and how many tokens each gave."""
    section = Section("text")
    if trace is None or not trace.text:
        return section
    section.quote = trace.prompt
    policy, tokens = f" with {trace.tree}" if trace.tree else "", 0
    places, counts, notes = [], [], []
    for number, step in enumerate(trace.iterations):
        pieces, n = step.pieces, len(step.emitted)
        note = f"iteration {number}: {n} token{'s' * (n != 1)}, {step.drafted} drafted"
        span_ = Span("".join(pieces[: step.drafted]), "".join(pieces[step.drafted :]), number, note)
        section.text.append(span_)
        if number:
            places.append(float(tokens))
            counts.append(float(n))
            notes.append(f"iteration {number}, from token {tokens} on: {n} tokens")
        tokens += n
    section.words = [
        f"{trace.target}{policy}, greedy, {trace.dtype}: {tokens} tokens in {len(trace.iterations)} target "
        f"forwards, accept_len {trace.accept_len:.2f} (one text; the tables above are the measurement)."
    ]
    if places:
        series = Series("tokens of an iteration", 0, places, counts, notes, line=False)
        frame = (0.0, max(places) * 1.03 + 1), span(counts, 0.0, 0.12)
        title = "tokens of each iteration by place in the output"
        section.panels.append(Chart(title, [series], "place in the output", "tokens", *frame))
    return section
