"""Ranges that fields declare."""

import math
from dataclasses import dataclass

import pytest

from drafttrain.utils.errors import UserError
from drafttrain.utils.ranges import check_ranges, setting


@dataclass
class Settings:
    name: str = "any"
    rows: int = setting(1, ge=1, metadata={"changes_output": False})
    share: float | None = setting(None, gt=0, le=1)
    betas: tuple[float, ...] = setting((0.9, 0.99), ge=0, lt=1)
    blocks: list[int] = setting(default_factory=lambda: [1], ge=0)


@pytest.mark.parametrize(
    "values", [{}, {"share": 1.0}, {"rows": 10**9, "betas": (0.0,), "blocks": []}, {"share": 1e-9}]
)
def test_within(values):
    check_ranges(Settings(**values), "some")


@pytest.mark.parametrize(
    "values, message",
    [
        ({"rows": 0}, "some.rows: must be >= 1, got 0"),
        ({"share": 0.0}, "some.share: must be > 0 and <= 1, got 0.0"),
        ({"share": math.nan}, "some.share: must be > 0 and <= 1, got nan"),
        ({"betas": (0.5, 1.0)}, "some.betas: must be >= 0 and < 1, got [0.5, 1.0]"),
        ({"rows": math.inf}, "some.rows: must be >= 1 and < inf, got inf"),
        ({"blocks": [3, -1]}, "some.blocks: must be >= 0, got [3, -1]"),
    ],
)
def test_outside(values, message):
    with pytest.raises(UserError) as error:
        check_ranges(Settings(**values), "some")
    assert str(error.value) == message


def test_other_metadata_stays():
    metadata = Settings.__dataclass_fields__["rows"].metadata
    assert metadata == {"changes_output": False, "bounds": {"ge": 1, "lt": math.inf}}
