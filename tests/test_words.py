"""`studies/words.py`: words that the field has better ones for, of which none is left."""

import pytest

from studies import words


def hits(text: str, suffix: str = ".md") -> list[str]:
    passages = words.READERS[suffix](text)
    return [word.lower() for passage in passages for _, word, _ in passage.hits()]


@pytest.mark.parametrize(
    "text, expected",
    [
        ("the tokens behind the root", ["behind"]),
        ("it was left behind", []),
        ("what the target says", ["target says"]),
        ("as the paper says", []),
        ("unless it says otherwise", []),
        ("a drafter that says so in `max_depth`", []),
        ("which tells how many", ["tells"]),
        ("rows that are told apart by rank", []),
        ("could not be told from noise", []),
        ("mended, made anew", ["anew", "mended"]),
        ("the files lie in a folder", ["lie"]),
        ("the key stands there", ["stands"]),
        ("L stands for the length; a stand-in", []),
        ("pct goes by costs", ["goes by"]),
        ("so many tokens", ["so many"]),
        ("used as it is.", ["as it is"]),
        ("the drafter as it is called", []),
        ("whatever\nthe mask", ["whatever"]),
        ("so\nmany tokens", ["so many"]),
        ('`behind`, "whatever" and “anew”', []),
        ("> as they said: whatever", []),
        ("```\nwhatever\n```", []),
    ],
)
def test_words_in_prose(text, expected):
    assert sorted(hits(text)) == expected


def test_words_in_code():
    text = '''"""Whether it fits."""
KEY = "behind"  # a key is no prose
def answer_anew(told):
    """What it is.

    The slots behind it.
    """
    # so many
    # tokens
    raise ValueError(f"mend {told}, "
                     "whatever it is")
'''
    assert sorted(hits(text, ".py")) == sorted(
        ["whether", "anew", "told", "what", "behind", "so many", "mend", "whatever"]
    )


def test_comments_of_recipes_alone_are_read():
    assert hits("behind: whatever  # drawn anew\n", ".yaml") == ["anew"]


def test_lines_are_those_of_the_words():
    passage = words.Passage([(3, "one two"), (4, "three whatever"), (5, "behind")])
    assert sorted((line, word) for line, word, _ in passage.hits()) == [(4, "whatever"), (5, "behind")]


def test_listing(capsys, monkeypatch, tmp_path):
    (tmp_path / "page.md").write_text("One.\n\nWhatever.\n")
    monkeypatch.setattr(words, "ROOT", tmp_path)
    monkeypatch.setattr(words, "files", lambda places=(): ["page.md"])
    assert words.main(["page.md"]) == 1
    assert capsys.readouterr().out == "page.md:3: Whatever (any, regardless of, everything that)\n"


def test_there_are_none():
    assert [path for path in words.files() if words.hits(path)] == []
