"""Plain text: characters, wrapped lines, tags."""

import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.data.documents import clean_characters, clean_document, detokenize, is_tagged, remove_tags

PROSE = (
    "The structure and dynamics of chromatin clearly differentiate the eukaryotes from the other "
    "superkingdoms of life. Eukaryotic chromatin undergoes a variety of structural and compositional "
    "changes that accompany the progression of the cell cycle and changes in gene expression. These "
    "dynamics are regulated both by a variety of protein interactions and by catalytic modification and "
    "reorganization of proteins."
)


def wrap(text: str, width: int, indent: int) -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,
    )


@pytest.mark.parametrize("width, indent", [(67, 8), (79, 0), (99, 4), (60, 2)])
@pytest.mark.parametrize("prose", [True, False])
def test_wrapped_lines_are_joined_and_headings_kept(width, indent, prose):
    blank = " " * indent + "\n"
    raw = (
        blank
        + blank
        + " " * indent
        + "Background\n"
        + wrap(PROSE, width, indent)
        + "\n"
        + blank
        + blank
        + blank
    )
    raw += " " * indent + "Methods\n" + wrap(PROSE, width, indent) + "\n"
    assert clean_document(raw, prose) == f"Background\n{PROSE}\n\nMethods\n{PROSE}"


@settings(max_examples=20)
@given(
    st.integers(50, 110),
    st.integers(0, 12),
    st.lists(st.integers(20, 60), min_size=3, max_size=6),
    st.randoms(),
)
def test_any_wrapped_prose_comes_back(width, indent, lengths, random):
    words = [word for text in (PROSE.lower(), PROSE.title()) for word in text.replace(".", "").split()]
    paragraphs = ["The " + " ".join(random.choices(words, k=n)) + "." for n in lengths]
    raw = "\n\n".join(wrap(paragraph, width, indent) for paragraph in paragraphs)
    assert clean_document(raw) == "\n\n".join(paragraphs)


def test_breaks_inside_a_sentence_of_wrapped_prose():
    lines = [
        wrap(PROSE, 67, 8),
        "        number of words ",
        "        (N) with a given occurrence",
        "        falls.",
    ]
    assert clean_document("\n".join(lines), prose=True).endswith(
        "number of words (N) with a given occurrence falls."
    )
    joined = clean_document(
        wrap(PROSE, 67, 8) + "\n" + " " * 8 + "x" * 48 + " well-\n        known", prose=True
    )
    assert joined.endswith(" well-known")


def test_text_that_is_not_wrapped_keeps_its_lines():
    code = "def f(x):\n    if x:\n        return 1\n    return 2\n\n\n\nf(1)\n"
    assert clean_document(code) == code.replace("\n\n\n\n", "\n\n").strip()
    poem = "Tyger Tyger, burning bright,\nIn the forests of the night;\nWhat immortal hand or eye,"
    assert clean_document(poem) == poem
    long_lines = f"  {PROSE}\n  {PROSE}"
    assert clean_document(long_lines, prose=True) == f"{PROSE}\n{PROSE}"


def test_citation_marks():
    assert clean_document("Power laws [ 1 ] and others [ 2 3, 4]. See [1].", prose=True) == (
        "Power laws and others. See [1]."
    )
    assert clean_document("a [ 1 ]") == "a [ 1 ]"


def test_characters():
    assert clean_characters("a\r\nb\rc") == "a\nb\nc"
    assert (
        clean_characters("By\u00adzantine\u00a0art\u2003of\ufeff the\u200b ﬁrst")
        == "Byzantine art of the first"
    )
    assert (
        clean_characters("can\ufffd\ufffd\ufffdt (U.S.C. \ufffd 12), end \ufffd\ufffd\n")
        == "can’t (U.S.C. 12), end\n"
    )
    assert clean_characters("tab\tbell\x07 — é 日本 ’") == "tab\tbell — é 日本 ’"


TAGGED = (
    "\"_'' We_PRP do_VBP n't_RB know_VB who_WP 's_VBZ winning_VBG ,_, \"_'' he_PRP said_VBD ._. \n"
    "Snake_case_NN costs_VBZ $_$ 5_CD (_( at_IN Winston-_NNP Salem_NNP )_) ._. \n\n\n\n"
    "um_UH ,_, \nright_JJ \nyeah_NN \n"
)


def test_tags_are_removed_and_words_joined():
    assert is_tagged(TAGGED)
    assert remove_tags(TAGGED) == (
        "\"We don't know who's winning,\" he said. Snake_case costs $5 (at Winston-Salem)."
        "\n\num,\nright\nyeah"
    )
    assert clean_document(TAGGED) == remove_tags(TAGGED)
    assert not is_tagged(PROSE)
    assert not is_tagged("call snake_case and other_name from my_module with some_args now")


@pytest.mark.parametrize(
    "words, text",
    [
        ("I ’m sure you ca n’t", "I’m sure you can’t"),
        ("can not gon na", "cannot gonna"),
        ("`` Yes '' , she said : no !", '"Yes", she said: no!'),
        ("50 % of the dogs ' food / water", "50% of the dogs' food/water"),
        ("the -- press - you know", "the -- press - you know"),
        ("[ From : < a@b.c > ]", "[From: <a@b.c>]"),
        ("wait ... what ?", "wait... what?"),
    ],
)
def test_detokenize(words, text):
    assert detokenize(words.split()) == text
