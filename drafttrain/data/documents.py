"""Clean plain text for training: odd characters, hard-wrapped lines, part-of-speech tags.

Written for OANC and MASC (most n-grams of the raw OANC are white space) and harmless to clean text.
"""

import itertools
import re
from collections import Counter

_SPACES = dict.fromkeys([0xA0, 0x1680, *range(0x2000, 0x200B), 0x202F, 0x205F, 0x3000], " ")
_NOTHING = dict.fromkeys([*range(0x20), 0x7F, *range(0x80, 0xA0), 0xAD, 0x200B, 0x2060, 0xFEFF])
_LINES = {ord("\n"): "\n", ord("\t"): "\t", 0x2028: "\n", 0x2029: "\n\n"}
_LIGATURES = {0xFB00: "ff", 0xFB01: "fi", 0xFB02: "fl", 0xFB03: "ffi", 0xFB04: "ffl"}
_CHARACTERS = _NOTHING | _SPACES | _LINES | _LIGATURES
_KINDS = {  # names under which odd characters are counted
    **dict.fromkeys(map(chr, _NOTHING), "control characters and soft hyphens removed"),
    **dict.fromkeys(map(chr, _SPACES), "odd spaces made plain"),
    **dict.fromkeys(map(chr, _LIGATURES), "ligatures taken apart"),
    "\ufffd": "replacement characters repaired or removed",
}
for _kept in "\n\t\r":
    _KINDS.pop(_kept, None)
_ODD = re.compile(f"[{re.escape(''.join(_KINDS))}]")

_WIDEST_WRAP = 120  # columns; text whose lines are longer was never wrapped
_TAGGED = re.compile(r"\S+_(?:[A-Z]{1,4}\$?|[.,:()#$\-]|''|``)")
_SENTENCE_END = re.compile(r"[.?!:;][\"'”’)\]]*$")
_CITATION = re.compile(r"\s*\[ [\d\s,–-]*\]")  # as in biomed; "[1, 2]" may be code


def clean_document(text: str, prose: bool = False, counts: Counter | None = None) -> str:
    """Return a document's text without layout.

    The result has one kind of line end and of space, no soft hyphens, control or replacement characters, no
    tags (`word_TAG`) and at most one blank line in a row. Hard-wrapped lines are joined where the document is
    recognizably wrapped prose.

    Args:
        text: the raw document.
        prose: whether the document is known to be prose; then wrapped lines are always joined, and spaced
            citation marks ("[ 1, 2]") are removed.
        counts: receives the number of changes by kind.
    """
    counts = Counter() if counts is None else counts
    counts["characters read"] += len(text)
    cleaned = _clean(text, prose, counts)
    counts["characters kept"] += len(cleaned)
    return cleaned


def _clean(text: str, prose: bool, counts: Counter) -> str:
    counts.update(_KINDS[character] for character in _ODD.findall(text))
    text = clean_characters(text)
    if is_tagged(text):
        counts["tagged documents put back into plain words"] += 1
        return remove_tags(text)
    lines = text.split("\n")
    width = _wrap_width(lines)
    if width is not None and (prose or _is_wrapped_prose(lines, width)):
        text = join_wrapped(lines, width)
        counts["wrapped lines joined"] += len(lines) - 1 - text.count("\n")
    elif prose:
        text = "\n".join(" ".join(line.split()) for line in lines)
    if prose:
        text, marks = _CITATION.subn("", text)
        counts["citation marks removed"] += marks
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


def clean_characters(text: str) -> str:
    """Replace or remove characters that a language model should not learn.

    U+FFFD between letters was an apostrophe in nearly all cases; elsewhere it is removed.
    """
    text = text.replace("\r\n", "\n").replace("\r", "\n").translate(_CHARACTERS)
    if "\ufffd" in text:
        text = re.sub(r"(?<=[^\W\d_])\ufffd+(?=[^\W\d_])", "’", text)
        text = re.sub(r" ?\ufffd+", "", text)
    return text


# ------------------------------------------------------------------------------------------ wrapped lines


def _wrap_width(lines: list[str]) -> int | None:
    """Return the column at which the lines were wrapped, or None for text that was not wrapped."""
    lengths = sorted(len(line.rstrip()) for line in lines if line.strip())
    if not lengths:
        return None
    width = lengths[int(0.98 * (len(lengths) - 1))]
    return width if width <= _WIDEST_WRAP else None


def _was_wrapped(line: str, following: str, width: int) -> bool:
    """Return whether a line ends only because the next line's first word did not fit."""
    return len(line.rstrip()) + 1 + len(following.split(maxsplit=1)[0]) > width


def _is_wrapped_prose(lines: list[str], width: int) -> bool:
    """Return whether most lines within paragraphs are full, and look like sentences rather than code."""
    pairs = [(line, after) for line, after in zip(lines, lines[1:]) if line.strip() and after.strip()]
    wrapped = [line for line, after in pairs if _was_wrapped(line, after, width)]
    worded = [line for line in wrapped if len(re.findall(r"[^\W\d_]{2,}", line)) >= 4]
    full = len(pairs) >= 3 and len(wrapped) > 0.6 * len(pairs)
    return width >= 40 and full and len(worded) > 0.8 * len(wrapped)


def join_wrapped(lines: list[str], width: int) -> str:
    """Join lines that were broken at `width` columns, and drop indentation.

    A line continues the previous one if its first word would not have fitted there, or if it starts in the
    middle of a sentence (mark-up in the original breaks lines anywhere). Line ends after headings and
    paragraphs are kept.
    """
    paragraphs: list[str] = []
    previous = ""  # the line before, unchanged
    for line in lines:
        words = " ".join(line.split())
        if not words:
            paragraphs.append("")
        elif previous.strip() and _continues(previous, line, width):
            # A hyphen before the break belongs to the word more often than to the line ("protein-\nprotein").
            glue = "" if re.search(r"\w-$", paragraphs[-1]) else " "
            paragraphs[-1] += glue + words
        else:
            paragraphs.append(words)
        previous = line
    return "\n".join(paragraphs)


def _continues(previous: str, line: str, width: int) -> bool:
    if _was_wrapped(previous, line, width):
        return True
    if _SENTENCE_END.search(previous.rstrip()):
        return False
    return line.strip()[0].islower() or previous.rstrip().endswith(",") or previous.endswith(" ")


# --------------------------------------------------------------------------------------------------- tags


def is_tagged(text: str) -> bool:
    """Return whether nearly every word at the document's start has a part-of-speech tag."""
    words = text[:20_000].split()[:1000]
    return len(words) >= 5 and sum(bool(_TAGGED.fullmatch(word)) for word in words) > 0.9 * len(words)


def remove_tags(text: str) -> str:
    """Return the detokenized text of a `word_TAG` document, each paragraph on one line.

    >>> remove_tags('We_PRP do_VBP n\\'t_RB know_VB ._. \\nWho_WP does_VBZ ?_.')
    "We don't know. Who does?"
    """
    paragraphs: list[str] = [""]
    for line in text.split("\n"):
        words = [word.rpartition("_")[0] if "_" in word else word for word in line.split()]
        sentence = detokenize([word for word in words if word])
        if not sentence:
            paragraphs.append("")
        elif _SENTENCE_END.search(paragraphs[-1]):
            paragraphs[-1] += " " + sentence
        else:
            paragraphs.append(sentence)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(paragraphs)).strip("\n")


# spaces before a token that belongs to the one before it, and after one that belongs to the next
_ATTACHED = re.compile(
    r" (?=(?:[.,;:?!%)\]}>”’…°]+|''|'|['’](?:s|m|d|re|ve|ll|em|t)|n['’]t)(?!\S))"
    r"|(?<=\bcan) (?=not\b)|(?<=\bgon|\bwan) (?=na\b)|(?<=\bgot) (?=ta\b)|(?<=\bgim|\blem) (?=me\b)",
    re.IGNORECASE,
)
_GLUED = re.compile(r"((?<!\S)(?:[(\[{<“‘$#]|``|`)|\w-) ")  # MASC splits "Winston-Salem" after the hyphen


def detokenize(words: list[str]) -> str:
    """Join Penn-Treebank tokens with the spaces of the original text.

    >>> detokenize(['"', "Ca", "n't", "I", "?", '"', "(", "Gore-", "Bush", ",", "$", "5", ")"])
    '"Can\\'t I?" (Gore-Bush, $5)'
    """
    marks = itertools.cycle(("``", "''"))
    text = " ".join(next(marks) if word == '"' else word for word in words).replace(" / ", "/")
    text = _ATTACHED.sub("", _GLUED.sub(r"\1", text))
    return text.replace("``", '"').replace("''", '"')
