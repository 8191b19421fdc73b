"""Find evaluation prompts in training data.

Texts are compared with case and punctuation folded, because copies in chats differ in quotes and line ends.
"""

import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from drafttrain.data.config import PromptSet
from drafttrain.data.prompt_rows import is_known, is_one_turn, prompt_words
from drafttrain.data.prompts import ENDINGS, read_rows, spread
from drafttrain.data.streams import open_streams, read_lines
from drafttrain.utils.errors import UserError, brief

OVERLAP = "contains an evaluation prompt"  # why a conversation is left out
_OPENING = 3  # first words of a prompt, by which contained prompts are looked up
_MIN_WORDS = 10  # a shorter prompt ("Continue.") counts only as a whole turn or paragraph
_PARAGRAPHS = re.compile(r"\n[^\S\n]*\n")  # separated by an empty line, with any line ends
_COMMON_WORDS = 3  # a prompt of up to this many words occurs in any text and is no sign of a copy


_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W_{_UNSPACED}]+")  # scripts without spaces: each character


def fold(text: str) -> str:
    """Return the lower-case words and numbers of a text, with one space between them; in scripts without
    spaces each character is a word.

    >>> fold("Who's  “there”? 请说 ２")
    'who s there 请 说 2'
    """
    return " ".join(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


class EvaluationPrompts:
    """A set of prompts that can be found in texts: as a whole turn or paragraph, or inside a longer one."""

    def __init__(self, prompts: Iterable[str]) -> None:
        self._whole = {folded for prompt in prompts if (folded := fold(prompt))}
        self._by_opening: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for prompt in sorted(self._whole):
            words = prompt.split(" ")
            if len(words) >= _MIN_WORDS:
                self._by_opening[tuple(words[:_OPENING])].append(f" {prompt} ")

    def __len__(self) -> int:
        return len(self._whole)

    @classmethod
    def read(cls, paths: Iterable[str | Path]) -> "EvaluationPrompts":
        """Read the prompts of any file that `read_prompts` takes, of folders of Parquet files, and of other
        files line by line. They are the rows' own words, without the request added for the model.

        Raises:
            UserError: a file is unreadable or empty, or has a row without a prompt.
        """
        return cls(turn for path in paths for row in _rows_of(path) for turn in row)

    def overlap(self, text: str) -> bool:
        """Return whether a turn or one of its paragraphs is a prompt, or contains one of at least ten words.

        Paragraphs are compared because benchmarks have Alpaca's prompts without their input, which is the
        second paragraph here, and because successive turns of a user are joined into paragraphs of one turn.
        """
        folded = fold(text)
        if folded in self._whole or any(fold(p) in self._whole for p in _PARAGRAPHS.split(text.strip())):
            return True
        words = folded.split(" ")
        openings = self._by_opening.keys() & set(zip(*(words[i:] for i in range(_OPENING)), strict=False))
        padded = f" {folded} "
        return any(prompt in padded for opening in openings for prompt in self._by_opening[opening])


def is_common(prompt: str) -> bool:
    """Return whether a prompt has so few words that any chat may hold it, such as "Continue."."""
    return len(fold(prompt).split()) <= _COMMON_WORDS


class MeasuredPrompts:
    """The prompts that a drafter will be measured on: no conversation that it learns from may hold one.

    Prompts of up to three words, such as "Continue.", occur in any chat and do not count.

    Args:
        sets: the prompt sets; only the rows and turns that will be decoded are compared.

    Raises:
        UserError: as `EvaluationPrompts.read`.
    """

    def __init__(self, sets: Iterable[PromptSet]) -> None:
        telling: dict[str, list[str]] = defaultdict(list)  # by file, which several sets may share
        for one in sets:
            rows = spread(_rows_of(one.path, one.turns), one.limit)
            telling[one.path] += [text for row in rows for text in row if not is_common(text)]
        self._prompts = {path: EvaluationPrompts(turns) for path, turns in telling.items()}
        self._found: dict[str, list[str]] = defaultdict(list)  # turns that hold one, by file

    def look(self, turns: Sequence[str]) -> None:
        """Record a conversation, given by its turns, if one of them holds a prompt."""
        for path, prompts in self._prompts.items():
            if (held := next(filter(prompts.overlap, turns), None)) is not None:
                self._found[path].append(held)

    def check(self, key: str = "corpus.sources", exclude: str = "corpus.exclude") -> None:
        """Require that no conversation so far holds a prompt.

        Args:
            key: the recipe's key of the conversations, for the error message.
            exclude: the recipe's key of the files whose prompts are left out, likewise.

        Raises:
            UserError: some hold one; the message has their number and an example for each file.
        """
        if not self._found:
            return
        held = ", ".join(
            f"{len(turns)} with prompts of {path} (such as {brief(turns[0], 60)!r})"
            for path, turns in self._found.items()
        )
        raise UserError(
            f"{key}: must hold no conversation with a prompt that evaluate.prompts measures on, got "
            f"{held}; add these files to {exclude}"
        )


def not_excluded(measured: Sequence[PromptSet], exclude: Sequence[str]) -> list[PromptSet]:
    """Return the prompt sets whose path is not in `exclude`, which leaves their prompts out anyway. A file in
    an excluded folder is returned, as not every file of a folder is read."""
    left_out = {Path(path).resolve() for path in exclude}
    return [one for one in measured if Path(one.path).resolve() not in left_out]


def _rows_of(path: str | Path, turns: int | None = None) -> list[list[str]]:
    """Return the texts of each row of a file or folder of prompts.

    Args:
        turns: those of the first turns alone. None: of all.

    Raises:
        UserError: it is unreadable or empty, or has a row without a prompt.
    """
    lines: list[str] = []
    if Path(path).is_file() and not _has_rows(path):
        lines = [line for stream in open_streams(path) for _, line in read_lines(stream)]
    if lines and not _is_json(lines[0]):  # otherwise JSON with an unusual suffix
        rows = [[line] for line in lines]
    else:
        rows = [_prompts_of(value, source, turns) for _, source, value in read_rows(path)]
    if not any(rows):
        raise UserError(f"{path}: no prompts in it; give .jsonl, .json or .txt files")
    return rows


def _is_json(line: str) -> bool:
    """Return whether a file with this first line holds JSON objects, one by one or in a list."""
    if line.strip() in ("[", "{"):
        return True
    try:
        return isinstance(json.loads(line), dict | list)
    except ValueError:
        return False


def _has_rows(path: str | Path) -> bool:
    """Return whether a file has the suffix of a table or is an archive."""
    return all(stream.suffix in ENDINGS or not stream.given for stream in open_streams(path))


def _prompts_of(value: object, source: str, turns: int | None) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, dict) or not is_known(value):
        raise UserError(
            f"{source}: no text under turns, question or prompt; give a file of evaluation prompts"
        )
    words = prompt_words(value, source)
    return words if is_one_turn(value) else words[:turns]
