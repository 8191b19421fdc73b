"""Values and the types that they fit."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from drafttrain.utils.types import check_types, fits


@dataclass
class Inner:
    n: int


@dataclass
class Outer:
    name: str
    parts: dict[str, Inner] = field(default_factory=dict)
    rows: list[list[float]] | None = None


@pytest.mark.parametrize(
    "value, hint, expected",
    [
        (1, int, True),
        (1, float, True),
        (1.5, int, False),
        (True, int, False),
        (True, bool, True),
        (math.nan, float, False),
        (math.inf, float, False),
        (10**400, float, False),
        (10**400, int, False),
        ([1, 2], list[int], True),
        ([1, True], list[int], False),
        ([1, 2.5], list[float], True),
        ([[1], ["a"]], list[list[float]], False),
        ("a", list[str], False),
        (None, str | None, True),
        (5, str | None, False),
        ("a", Literal["a", "b"], True),
        ([], Literal["a", "b"], False),
        ({"a": [1]}, dict[str, list[int]], True),
        ({1: [1]}, dict[str, list[int]], False),
        (object(), Any, True),
        (Inner(1), Inner, True),
        (Inner("1"), Inner, False),
        ({"n": 1}, Inner, False),
    ],
)
def test_fits(value, hint, expected):
    assert fits(value, hint) is expected


def test_the_field_is_named():
    check_types(Outer("a", {"b": Inner(1)}, [[1.0], []]))
    for wrong, name in (
        (Outer(5), "name"),
        (Outer("a", {"b": Inner("c")}), "parts"),
        (Outer("a", rows=[1]), "rows"),
    ):
        with pytest.raises(TypeError, match=f"{name} is of the wrong type"):
            check_types(wrong)
