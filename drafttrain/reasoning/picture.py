"""Drawings of a finished tree of thoughts: an HTML page without network and scripts, and Graphviz text."""

import json
import textwrap
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from drafttrain.reasoning.trace import Trace
from drafttrain.utils.errors import UserError

WIDTH = 36  # characters of a line in a Graphviz node
LINES = 6  # maximum lines of a thought in a Graphviz node
COLORS = {"chosen": "#0a7f5a", "failed": "#c4420a", "other": "#888888"}


@dataclass
class Drawn:
    """A node of the picture.

    Attributes:
        path: of its state.
        kind: "chosen" (on the path of the result), "failed" or "other".
        label: score or error.
        thought: the texts of its newest thought.
        calls: recorded calls of its state.
        children: nodes below it.
    """

    path: tuple[int, ...]
    kind: str
    label: str
    thought: dict[str, str]
    calls: list[dict[str, Any]]
    children: list["Drawn"] = field(default_factory=list)


def to_html(trace: Trace) -> str:
    """Return a page with the tree, its thoughts and scores, and every prompt with its answer.

    Raises:
        UserError: the tree is not finished.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    template = environment.from_string((files(__package__) / "tree.html").read_text(encoding="utf-8"))
    return template.render(trace=trace, steps=_in_order(_drawn(trace)), summary=summary(trace))


def to_graphviz(trace: Trace) -> str:
    """Return the tree as Graphviz source, for `dot`.

    Raises:
        UserError: the tree is not finished.
    """
    lines = ["digraph thoughts {", '  node [shape=box, style=rounded, fontname="sans-serif"];']
    waiting = [_drawn(trace)]
    while waiting:
        node = waiting.pop(0)
        texts = " / ".join(node.thought.values())
        words = textwrap.wrap(texts, WIDTH, max_lines=LINES, placeholder=" …")
        label = "\n".join([node.label, *words])
        width = 2 if node.kind == "chosen" else 1
        look = f'color="{COLORS[node.kind]}", penwidth={width}'
        lines.append(f"  {_name(node.path)} [label={json.dumps(label, ensure_ascii=False)}, {look}];")
        if node.path:
            lines.append(f'  {_name(node.path[:-1])} -> {_name(node.path)} [color="{COLORS[node.kind]}"];')
        waiting += node.children
    return "\n".join([*lines, "}", ""])


def summary(trace: Trace) -> str:
    """Return one line with a tree's size, time and result."""
    calls = sum(len(entry["calls"]) for entry in trace.rounds)
    tokens = sum(len(call["token_ids"]) for entry in trace.rounds for call in entry["calls"])
    if trace.result is None:
        end = f"no result: {trace.error}"
    else:
        details = ", ".join(f"{key.replace('_', ' ')} {_shown(value)}" for key, value in trace.result.items())
        end = f"result: {details}"
    return (
        f"{len(trace.states)} states, {calls} calls in {len(trace.rounds)} rounds, {tokens} tokens, "
        f"{trace.seconds:.1f} s, {trace.without_score} answers without a score; {end}"
    )


def _in_order(root: Drawn) -> list[tuple[Drawn, int]]:
    """Return all nodes, each before those below it, with the number of levels that end after it. A page that
    is made from a list has no limit of depth, as recursion has."""
    nodes, waiting = [], [root]
    while waiting:
        nodes.append(waiting.pop())
        waiting += reversed(nodes[-1].children)
    depths = [len(node.path) for node in nodes] + [0]
    return [(node, len(node.path) - after) for node, after in zip(nodes, depths[1:])]


def _drawn(trace: Trace) -> Drawn:
    """Return the root of the picture, with all nodes below it."""
    if not trace.finished:
        raise UserError(
            f"{trace.problem['id']}: must be a finished tree, got one of {len(trace.rounds)} rounds"
        )
    calls: dict[tuple[int, ...], list] = {}
    for call in (call for entry in trace.rounds for call in entry["calls"]):
        calls.setdefault(tuple(call["path"]), []).append(call)
    closing = trace.states[-1]["path"] if trace.closing else trace.leaf
    chosen = tuple(closing or ())
    nodes: dict[tuple[int, ...], Drawn] = {}
    for state in trace.states:
        path = tuple(state["path"])
        kind = "failed" if state["error"] else "chosen" if chosen[: len(path)] == path else "other"
        has_thought = len(state["thoughts"]) == len(path) > 0
        thought = state["thoughts"][-1] if has_thought else {}
        nodes[path] = Drawn(path, kind, _label(state), thought, calls.get(path, []))
        if path:
            nodes[path[:-1]].children.append(nodes[path])
    return nodes[()]


def _label(state: dict[str, Any]) -> str:
    if state["error"]:
        return f"failed: {state['error']}"
    if not state["path"]:
        return "problem"
    return "closing generation" if state["score"] is None else f"score {state['score']:g}"


def _name(path: tuple[int, ...]) -> str:
    return "_".join(["root", *map(str, path)])


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
