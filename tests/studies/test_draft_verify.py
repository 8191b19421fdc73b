"""The picture of one iteration that the first page shows."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from drafttrain.report.trace import Trace
from drafttrain.utils.errors import UserError
from studies.draft_verify import draw, rows_of

ROOT = Path(__file__).resolve().parents[2]
TRACE = ROOT / "docs/results/raw/trace.json"


@pytest.fixture(scope="module")
def trace() -> Trace:
    return Trace.load(TRACE)


def test_the_committed_picture_is_drawn_from_the_committed_trace(trace):
    assert draw(trace, 1) == (ROOT / "docs/draft_verify.svg").read_text()


def test_every_token_of_the_tree_and_the_targets_own_are_in_the_picture(trace):
    iteration = trace.iterations[1]
    root = ElementTree.fromstring(draw(trace, 1))
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    for token in [*iteration.texts, iteration.pieces[-1]]:
        assert token.strip() in texts


def test_every_iteration_that_drafts_can_be_drawn(trace):
    for number, iteration in enumerate(trace.iterations):
        if len(iteration.tokens) > 1:
            drawn = draw(trace, number)
            ElementTree.fromstring(drawn)
            assert (
                len(re.findall("<rect", drawn)) == len(iteration.tokens) + 2
            )  # the target's own, the ground


def test_no_two_nodes_of_a_depth_share_a_row(trace):
    for iteration in trace.iterations[1:]:
        if iteration.tokens:
            places = list(zip(iteration.depths, rows_of(iteration), strict=True))
            assert len(set(places)) == len(places)


@pytest.mark.parametrize("number", [0, -1, 10_000])
def test_an_iteration_without_drafts_is_refused_in_one_line(trace, number):
    with pytest.raises(UserError, match=f"^--iteration: must be one that drafts .*, got {number}$"):
        draw(trace, number)
