"""Quantiles of measurements."""

import statistics
from collections.abc import Sequence


def quartiles(values: Sequence[float]) -> list[float]:
    """Lower quartile, median and upper quartile, by linear interpolation between the sorted values."""
    if len(values) == 1:
        return [values[0]] * 3
    return statistics.quantiles(values, n=4, method="inclusive")
