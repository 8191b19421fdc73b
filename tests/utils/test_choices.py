"""Words of settings that types declare, as programs may misspell them."""

from dataclasses import dataclass
from typing import Literal

import pytest

from drafttrain.utils.choices import check_choices
from drafttrain.utils.errors import UserError


@dataclass
class Settings:
    mode: Literal["one", "two"] = "one"
    overlap: bool | Literal["auto"] = "auto"
    dtype: Literal["int8"] | None = None
    name: str = "any"
    names: list[str] | None = None


@pytest.mark.parametrize(
    "given", [{}, {"mode": "two"}, {"overlap": True}, {"dtype": "int8", "name": "x", "names": ["y"]}]
)
def test_words_that_are_allowed(given):
    check_choices(Settings(**given))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"mode": "three"}, "part.mode: must be one of one, two, got three"),
        ({"overlap": "always"}, "part.overlap: must be one of auto, got always"),
        ({"dtype": "int4"}, "part.dtype: must be one of int8, got int4"),
    ],
)
def test_words_that_are_not(given, problem):
    with pytest.raises(UserError, match=problem):
        check_choices(Settings(**given), "part")
