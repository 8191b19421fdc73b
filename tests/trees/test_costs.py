"""Cost curves between and beyond what was measured."""

import pytest
import torch

from drafttrain.trees.costs import CostCurve, Costs, Promise

CURVE = CostCurve((1, 4, 8), (10.0, 13.0, 21.0))


@pytest.mark.parametrize(
    "n, seconds", [(1, 10), (2, 11), (3, 12), (4, 13), (5, 15), (8, 21), (16, 42), (0, 10)]
)
def test_a_straight_line_between_neighbours(n, seconds):
    assert CURVE(n) == pytest.approx(seconds)


def test_what_the_policies_take():
    flat, promise = CostCurve((1,), (0.5,)), Promise()
    costs = Costs(flat, CURVE, CostCurve((1, 2), (9.0, 9.5)), 40.0, (0.5, 0.4), promise)
    assert costs.for_pct() == {"draft_seconds": 0.5, "verify_seconds": 9.0}
    assert costs.for_timed() == {
        "draft_seconds": flat,
        "verify_seconds": CURVE,
        "rate": 40.0,
        "acceptance": (0.5, 0.4),
        "promise": promise,
    }


def test_a_promise_between_what_was_measured():
    promise = Promise((-4.0, -2.0, 0.0), (0.1, 0.3, 0.9))
    values = torch.tensor([[-torch.inf, -9.0, -4.0], [-3.0, -1.0, 0.0]])
    expected = torch.tensor([[0.0, 0.1, 0.1], [0.2, 0.6, 0.9]])
    torch.testing.assert_close(promise(values), expected)
