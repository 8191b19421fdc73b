"""Quantiles of measurements."""

import statistics
from collections.abc import Sequence


def quartiles(values: Sequence[float]) -> list[float]:
    """Return lower quartile, median and upper quartile of at least one value, interpolated linearly between
    sorted values."""
    if len(values) == 1:
        return [values[0]] * 3
    return statistics.quantiles(values, n=4, method="inclusive")
