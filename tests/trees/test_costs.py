"""Cost curves between and beyond what was measured."""

import dataclasses

import numpy as np
import pytest

from drafttrain.trees.c2t import C2tPolicy
from drafttrain.trees.costs import AcceptanceCurve, CostCurve, Costs
from drafttrain.trees.pct import PctPolicy
from drafttrain.trees.timed import TimedPolicy

CURVE = CostCurve((1, 4, 8), (10.0, 13.0, 21.0))


@pytest.mark.parametrize(
    "n, seconds", [(1, 10), (2, 11), (3, 12), (4, 13), (5, 15), (8, 21), (16, 42), (0, 10)]
)
def test_a_straight_line_between_neighbours(n, seconds):
    assert CURVE(n) == pytest.approx(seconds)


def test_what_the_policies_take():
    flat, promise = CostCurve((1,), (0.5,)), AcceptanceCurve()
    costs = Costs(flat, CURVE, CostCurve((1, 2), (9.0, 9.5)), 40.0, (0.5, 0.4), promise)
    assert PctPolicy.calibrated(costs, {"threshold"}) == {}
    assert PctPolicy.calibrated(costs) == {"draft_seconds": 0.5, "verify_seconds": 9.0}
    assert TimedPolicy.calibrated(costs) == {
        "draft_seconds": flat,
        "verify_seconds": CURVE,
        "rate": 40.0,
        "acceptance": (0.5, 0.4),
        "promise": promise,
    }


def test_what_is_worth_verifying_and_expanding():
    """At 40 tokens/s a token more, a millisecond, has to bring 0.04; a layer of 4 ms and a token 0.2, which
    every second of its nodes keeps."""
    verify = CostCurve((1, 9, 17), (0.020, 0.028, 0.040))
    costs = Costs(CostCurve((1,), (0.004,)), verify, verify, 70.0, (0.5, 0.4), AcceptanceCurve())
    assert costs.worth(40.0) == pytest.approx((0.04, 0.4))
    assert costs.worth(80.0) == pytest.approx((0.08, 0.8)) and costs.worth(1e4) == (0.95, 0.95)
    flat = CostCurve((1, 64), (0.02, 0.02))
    assert dataclasses.replace(costs, verify=flat).worth(40.0) == pytest.approx((0.005, 0.32))
    assert C2tPolicy.calibrated(costs) == {}


def test_a_promise_between_what_was_measured():
    promise = AcceptanceCurve((-4.0, -2.0, 0.0), (0.1, 0.3, 0.9))
    values = np.array([[-9.0, -4.0], [-3.0, -1.0], [0.0, 1e-9]])
    np.testing.assert_allclose(promise(values), [[0.1, 0.1], [0.2, 0.6], [0.9, 0.9]])
