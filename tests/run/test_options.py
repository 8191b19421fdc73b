"""Options that are made from dataclasses: their types, defaults and explanations."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from drafttrain.run import cli
from drafttrain.run.options import Parser, add_settings, given
from drafttrain.utils.errors import UserError


@dataclass
class Settings:
    """Some settings.

    Attributes:
        limit: prompts at most. None: all.
        share: of the 100% that there are.
        seed: of the draws.
        names: which ones.
        sizes: of the
            windows.
        how: what to do.
        quick: hurry.
        hidden: not an option.
    """

    limit: int | None = None
    share: float = 0.5
    seed: int = 0
    names: list[str] = field(default_factory=list)
    sizes: tuple[float, ...] = (1.0, 2.5)
    how: Literal["warn", "refuse"] = "warn"
    quick: bool = False
    hidden: int = 3


@pytest.fixture
def parser(monkeypatch) -> Parser:
    monkeypatch.setenv("COLUMNS", "80")
    parser = Parser("test")
    add_settings(parser, Settings, "limit", "share", "seed", "names", "sizes", "how", "quick")
    return parser


def test_what_is_not_given_is_the_dataclasses_default(parser):
    args = parser.parse_args([])
    assert vars(args) == {} and Settings(**given(args, "limit", "quick")) == Settings()


def test_types(parser):
    words = "--limit 3 --share 1e-3 --names a b --names c --sizes 4 --how refuse --quick"
    assert vars(parser.parse_args(words.split())) == {
        "limit": 3,
        "share": 1e-3,
        "names": ["a", "b", "c"],
        "sizes": [4.0],
        "how": "refuse",
        "quick": True,
    }


def test_help(parser):
    lines = [" ".join(line.split()) for line in parser.format_help().split("\n")]
    assert lines[lines.index("--limit N prompts at most (default: all)") :][:7] == [
        "--limit N prompts at most (default: all)",
        "--share X of the 100% that there are (default: 0.5)",
        "--seed N of the draws (default: 0)",
        "--names NAMES ... which ones",
        "--sizes X ... of the windows (default: 1 2.5)",
        "--how {warn,refuse} what to do (default: warn)",
        "--quick hurry",
    ]


@pytest.mark.parametrize(
    "words, message",
    [
        ("--limit x", "--limit: must be a whole number >= 0, got x"),
        ("--limit -1", "--limit: must be a whole number >= 0, got -1"),
        ("--share x", "--share: must be a number, got x"),
        ("--how x", "--how: must be one of warn, refuse, got x"),
        ("--names", "--names: expected at least one argument"),
    ],
)
def test_mistakes(parser, words, message):
    with pytest.raises(UserError) as error:
        parser.parse_args(words.split())
    assert str(error.value) == message


def test_an_empty_text_is_not_taken_for_an_option_left_out():
    for words in (["generate", "--tree", ""], ["calibrate", ""], ["benchmark", "--trees", "timed", ""]):
        with pytest.raises(UserError, match="must not be empty; leave it out for its default"):
            cli.parse(words)
