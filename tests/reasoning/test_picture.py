"""Pictures of trees: every node and text is there, and nothing of a text becomes markup."""

import re

import pytest

from drafttrain.reasoning.picture import summary, to_graphviz, to_html
from drafttrain.reasoning.reason import reason
from drafttrain.reasoning.trace import Trace
from drafttrain.utils.errors import UserError
from tests.reasoning.toys import PROBLEM, Scripted, Toy, table_model


@pytest.fixture
def trace():
    return reason(Toy(), PROBLEM, table_model({"1": 8, "12": 5}, ["think 1#0"]))


def test_html(trace):
    page = to_html(trace)
    assert page.count('<div class="state">') == len(trace.states)
    assert page.count('class="chosen"') == 5 and page.count('class="failed"') == 1
    assert "score 8" in page and "failed: think 1 failed" in page and "closing generation" in page
    assert summary(trace) in page and "<pre>judge 12\n<b>5</b></pre>" in page
    assert len(re.findall("<ul>", page)) == len(re.findall("</ul>", page))
    assert "http:" not in page and "https:" not in page and "<script" not in page


def test_graphviz(trace):
    text = to_graphviz(trace)
    assert text.startswith("digraph thoughts {") and text.endswith("}\n")
    assert len(re.findall(r"^  \w+ \[label=", text, re.MULTILINE)) == len(trace.states)
    edges = re.findall(r"^  (\w+) -> (\w+) ", text, re.MULTILINE)
    assert len(edges) == len(trace.states) - 1 and ("root_1", "root_1_2") in edges
    assert r'root_1_2 [label="score 5\n2", color="#0a7f5a", penwidth=2];' in text


def test_texts_are_escaped():
    script = lambda prompt, k: '<b>"x" & \\y\n' if prompt.startswith("think") else "1"  # noqa: E731
    trace = reason(Toy(), PROBLEM, Scripted(script))
    assert "&lt;b&gt;&#34;x&#34; &amp; \\y" in to_html(trace) and '<b>"' not in to_html(trace)
    assert r'label="score 1\n<b>\"x\" & \\y"' in to_graphviz(trace)


def test_long_thoughts_are_cut_in_graphviz_only():
    script = lambda prompt, k: "word " * 200 if prompt.startswith("think") else "1"  # noqa: E731
    trace = reason(Toy(), PROBLEM, Scripted(script))
    labels = re.findall(r'label="(.*?)"', to_graphviz(trace))
    assert max(label.count(r"\n") for label in labels) == 6 and "…" in labels[1]
    assert "word " * 150 in to_html(trace)


def test_summary(trace):
    calls = sum(len(entry["calls"]) for entry in trace.rounds)
    assert summary(trace).startswith(f"{len(trace.states)} states, {calls} calls in 4 rounds, ")
    assert summary(trace).endswith("; result: success True, digits 1200")


def test_a_deep_tree_has_a_page():
    states = [
        {"path": [0] * depth, "thoughts": [{"text": f"level {n}"} for n in range(depth)], "score": 1.0}
        for depth in range(1001)
    ]
    states.append({"path": [1], "thoughts": [{"text": "aside"}], "score": 0.0})
    trace = Trace("toy", {"id": "p", "text": ""}, {}, states=[{**state, "error": None} for state in states])
    trace.finished, trace.leaf, trace.error = True, [0] * 1000, "none"
    page = to_html(trace)
    assert page.count("<li") == page.count("</li>") == 1002 and "level 999" in page
    assert (
        page.count("<ul>") == page.count("</ul>") == 1002 - 1
    )  # the two leaves have none, the page one more
    assert page.index("level 999") < page.index("aside")


def test_a_tree_without_result():
    trace = reason(Toy(), PROBLEM, table_model({}, ["think "]))
    assert summary(trace).endswith("; no result: think  failed")
    assert to_html(trace).count('class="failed"') == 3


def test_unfinished_trees_are_refused():
    with pytest.raises(UserError, match="p: must be a finished tree, got one of 0 rounds"):
        to_html(Trace("toy", {"id": "p", "text": ""}, {}))
