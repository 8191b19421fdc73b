"""Values that are computed from a calibration when it is read."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.isotonic import isotonic_regression

from drafttrain.calibration.calibration import Curve, non_decreasing


@given(st.lists(st.floats(1e-4, 10), max_size=20))
def test_values_are_evened_out_as_by_isotonic_regression(values):
    found = non_decreasing(values)
    assert found == sorted(found)
    assert found == pytest.approx(isotonic_regression(values).tolist() if values else [])


def test_costs_never_fall():
    curve = Curve(256, [1, 2, 4, 8], [0.0] * 4, [1.0, 3.0, 2.0, 4.0], [9.0] * 4)
    assert curve.cost().seconds == (1.0, 2.5, 2.5, 4.0)
