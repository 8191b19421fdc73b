"""Measurements that end at once, for tests that are not about what they find."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def hasty_calibrations() -> Iterator[None]:
    """Let short calibrations measure as little as they can, in this process and its forks."""
    from drafttrain.calibration import quick

    limits = dict.fromkeys(("CURVE_SECONDS", "TREE_SECONDS", "CHAIN_SECONDS"), 0.0)
    with patch.multiple(quick, **limits, is_disturbed=lambda found: False):
        yield


@contextmanager
def short_looks() -> Iterator[None]:
    """Let commands look for a moment alone whether the machine is busy, in this process and its forks."""
    from drafttrain.utils import machine

    with patch.object(machine, "LOOK", 0.05):
        yield
