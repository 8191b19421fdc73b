"""Reliability of confidence against sums worked out by hand."""

import numpy as np
import pytest

from drafttrain.calibration.confidence import TEMPERATURES, best_temperature, reliability


def test_by_hand():
    row = reliability([0.05, 0.35, 0.32, 0.95, 1.0], [False, True, False, True, True])
    assert row.tokens == 5 and row.accepted == 0.6
    assert row.confidence == pytest.approx(2.67 / 5)
    assert [n for n, _, _ in row.bins] == [1, 0, 0, 2, 0, 0, 0, 0, 0, 2]
    assert row.bins[1] == [0, None, None]
    assert row.bins[3] == [2, pytest.approx(0.335), 0.5]
    assert row.ece == pytest.approx((0.05 + 2 * (0.5 - 0.335) + 2 * (1 - 0.975)) / 5)
    assert row.brier == pytest.approx((0.05**2 + 0.65**2 + 0.32**2 + 0.05**2) / 5)
    assert row.auroc == 1.0
    assert reliability([0.3, 0.2], [True, True]).auroc is None


def test_the_temperature_that_made_the_outcomes_is_found():
    """Tokens are accepted with the probability that temperature 1.5 would give."""
    rng = np.random.default_rng(0)
    at_one = rng.uniform(0.05, 0.95, 40_000)
    logit = np.log(at_one / (1 - at_one))
    confidence = np.stack([1 / (1 + np.exp(-logit / t)) for t in TEMPERATURES], 1)
    accepted = rng.uniform(size=len(logit)) < confidence[:, TEMPERATURES.index(1.5)]
    assert best_temperature(confidence, accepted) == pytest.approx(1.5, abs=0.11)
