"""Messages of other libraries, on one line that ends where a sentence or a word does."""

import pytest

from drafttrain.utils.errors import brief


@pytest.mark.parametrize(
    "text, limit, expected",
    [
        ("It is\n  short.", 12, "It is short."),
        ("A sentence here. And another one", 20, "A sentence here. …"),
        ("A. Then a much longer sentence", 20, "A. Then a much…"),  # too little would be left
        ("What is first; what is second", 22, "What is first …"),
        ("find the appropriate, and", 21, "find the appropriate…"),
        ("find the appropriate one", 19, "find the…"),
        ("x" * 30, 10, "x" * 9 + "…"),  # no word to end at
    ],
)
def test_brief(text, limit, expected):
    assert brief(text, limit) == expected and len(expected) <= limit
