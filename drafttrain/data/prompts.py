"""Evaluation prompts, read from the files of benchmarks.

`prompt_rows.py` finds the prompt in a row. A .txt or .tsv file has one prompt per line, or a question and,
after a tab, its answers (TriviaQA); a .csv file is one of MMLU's, or has a header with a row's keys.
"""

import csv
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from drafttrain.data.chat import encode_prompt
from drafttrain.data.config import PromptSet
from drafttrain.data.message import Message
from drafttrain.data.prompt_rows import flatten, group_of, is_known, prompt_turns
from drafttrain.data.rows import well_formed
from drafttrain.data.streams import (
    JSON_LINES,
    TEXT,
    Stream,
    open_streams,
    read_lines,
    read_values,
    readable,
)
from drafttrain.utils.errors import UserError

MMLU_TEST = "_test.csv"
# files in MMLU's archive that are not read: other splits and notes
MMLU_OTHERS = re.compile(r"_(dev|val)\.csv$|auxiliary_train/|possibly_contaminated_urls\.txt$")
ENDINGS = (*JSON_LINES, ".json", ".parquet", ".csv", ".tsv", *TEXT)
ID_KEYS = ("question_id", "task_id", "id", "conversation_id", "prompt_id", "query_id", "example_id")
LISTS = {"turns", "choices", "test_list", "translation", "conversations", "messages"}  # not in CSV cells
T = TypeVar("T")


@dataclass
class Prompt:
    """The user's side of one chat.

    Attributes:
        id: unique in its file.
        turns: the user's turns; the target answers each before the next.
        system: the system prompt, if the row has one.
        group: part of its benchmark that the row belongs to, if it names one.
    """

    id: str
    turns: list[str]
    system: str | None = None
    group: str | None = None

    def token_ids(self, tokenizer: PreTrainedTokenizerBase, answers: Sequence[str] = ()) -> list[int]:
        """Return the ids of the chat up to the next answer, the header of its turn included.

        Args:
            answers: the target's answers to the first turns.

        Raises:
            UserError: answers or a system prompt without a chat template, or one that refuses these turns.
        """
        if not tokenizer.chat_template and self.system is None and not answers:
            return tokenizer(self.turns[0])["input_ids"]  # a base model continues the text
        messages = [] if self.system is None else [Message("system", self.system)]
        for turn, answer in zip(self.turns, answers):
            messages += [Message("user", turn), Message("assistant", answer)]
        return encode_prompt(tokenizer, [*messages, Message("user", self.turns[len(answers)])])


@dataclass
class Task:
    """A prompt set with its prompts, of each of which at most `turns` turns are decoded."""

    name: str
    prompts: list[Prompt]
    turns: int = 1

    def parts(self) -> list["Task"]:
        """Return one task per group of prompts if there are several groups (Spec-Bench), else the task."""
        by_group: dict[str, list[Prompt]] = {}
        for prompt in self.prompts:
            by_group.setdefault(prompt.group or "other", []).append(prompt)
        if len(by_group) < 2:
            return [self]
        return [Task(f"{self.name}/{group}", prompts, self.turns) for group, prompts in by_group.items()]

    @property
    def n_turns(self) -> int:
        """Return the number of chat turns that will be decoded."""
        return sum(min(self.turns, len(prompt.turns)) for prompt in self.prompts)

    @classmethod
    def read(cls, prompts: PromptSet) -> "Task":
        """Read the prompts of a set from its file; errors are those of `read_prompts`."""
        return cls(prompts.name, read_prompts(prompts.path, prompts.limit), prompts.turns)


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Read prompts from a .jsonl, .json, .parquet, .csv, .tsv or .txt file, gzipped or not, or from a folder
    or archive of such files. Of MMLU's archive only the test split is read.

    Args:
        limit: number of prompts to take, evenly spaced; None for all.

    Raises:
        UserError: the file is missing, damaged or not UTF-8, or holds no prompt, or a row has none; a folder
            of Parquet files, which are a data set with splits.
    """
    if any(stream.suffix == ".parquet" and not stream.given for stream in open_streams(path)):
        raise UserError(
            f"{path}: must not be a folder of Parquet files, which are the splits of a data set; name one of "
            f"them, or in a benchmark hub:{path}"
        )
    prompts = make_prompts(read_rows(path))
    if not prompts:
        raise UserError(f"{path}: no prompts in it; give rows with turns, question, prompt or a chat")
    return spread(prompts, limit)


def read_rows(path: str | Path) -> Iterator[tuple[int, str, Any]]:
    """Yield (number, source, value) for each row of a file, or of the tables and texts in a folder or
    archive.

    Raises:
        UserError: the file is missing, damaged or not UTF-8.
    """
    is_mmlu = any(stream.name.endswith(MMLU_TEST) for stream in open_streams(path))
    for stream in open_streams(path):
        if not stream.given and (stream.is_companion or stream.suffix not in ENDINGS):
            continue
        if is_mmlu and MMLU_OTHERS.search(stream.name):
            continue
        rows = ((number, row) for number, value in _values(stream) for row in flatten(value))
        for count, (number, row) in enumerate(rows, 1):
            number = max(number, count)  # count for nested rows, number for blank lines
            yield number, f"{stream.source}:row {number}", row


def make_prompts(rows: Iterable[tuple[int, str, Any]]) -> list[Prompt]:
    """Return prompts with unique ids, made from rows of (number, source for messages, value).

    Raises:
        UserError: a row has no prompt.
    """
    prompts: list[Prompt] = []
    seen: set[str] = set()
    for number, source, value in rows:
        prompt = _prompt(value, source, str(number))
        if prompt.id in seen:  # measurements are stored by id
            names = (f"{prompt.id}#{n}" for n in itertools.count(number))
            prompt.id = next(name for name in names if name not in seen)
        seen.add(prompt.id)
        prompts.append(prompt)
    return prompts


def first_of_each(tasks: Sequence[Task], n: int) -> list[Task]:
    """Return tasks with n prompts in all, taken from the start of each task in rotation."""
    taken = {task.name: 0 for task in tasks}
    while n and any(taken[task.name] < len(task.prompts) for task in tasks):
        for task in tasks:
            if n and taken[task.name] < len(task.prompts):
                taken[task.name] += 1
                n -= 1
    return [Task(task.name, task.prompts[: taken[task.name]]) for task in tasks if taken[task.name]]


def spread(items: Sequence[T], n: int | None) -> list[T]:
    """Return n evenly spaced items, so that they cover all categories of a file; None: all."""
    n = len(items) if n is None else min(n, len(items))
    return [items[i * len(items) // n] for i in range(n)]


def _values(stream: Stream) -> Iterator[tuple[int, Any]]:
    if stream.suffix in (*TEXT, ".tsv"):
        for row, line in read_lines(stream):
            question, _, answers = line.partition("\t")
            is_trivia = answers.lstrip('"').startswith("[")
            yield row, {"prompt": (question if is_trivia else line).strip()}
    else:
        yield from _table_rows(stream) if stream.suffix == ".csv" else read_values(stream)


def _table_rows(stream: Stream) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a table with a header, or of one of MMLU's files, which have none."""
    with readable(stream.source):
        text = io.StringIO(stream.bytes.read().decode("utf-8-sig"), newline="")
    table = csv.reader(text)
    try:
        first = next(table, [])
        if _is_mmlu(first):
            yield from _mmlu_rows(stream, itertools.chain([first], table))
        else:
            yield from _rows_below(stream, first, table)
    except csv.Error as error:
        raise UserError(f"{stream.source}: not a CSV table ({error}); fix it or fetch it again") from None


def _is_mmlu(cells: Sequence[str]) -> bool:
    return len(cells) == 6 and cells[5] in ("A", "B", "C", "D")


def _mmlu_rows(stream: Stream, table: Iterable[list[str]]) -> Iterator[tuple[int, Any]]:
    """Yield the rows of one of MMLU's files: a question, four choices and the letter of the answer."""
    name = PurePosixPath(stream.name).stem
    for row, cells in enumerate(table, 1):
        if not _is_mmlu(cells):
            raise UserError(
                f"{stream.source}:row {row}: must be as in MMLU (question, four choices, letter of the "
                f"answer), got {len(cells)} cells; write other prompts as .jsonl"
            )
        subject = name.rpartition("_")[0] or name
        yield row, {"id": f"{name}-{row}", "question": cells[0], "choices": cells[1:5], "subject": subject}


def _rows_below(
    stream: Stream, header: Sequence[str], table: Iterable[list[str]]
) -> Iterator[tuple[int, Any]]:
    keys = dict.fromkeys(header, "")
    if not is_known(keys) or not LISTS.isdisjoint(keys):
        raise UserError(
            f"{stream.source}:row 1: must be a header with question, prompt, article or instruction, or as "
            f"in MMLU, got {', '.join(header)[:60]!r}; write other prompts as .jsonl"
        )
    for row, cells in enumerate(table, 1):
        if len(cells) != len(header):
            raise UserError(
                f"{stream.source}:row {row}: must have {len(header)} cells as the header, got {len(cells)}; "
                "fix it"
            )
        yield row, dict(zip(header, cells))


def _prompt(row: Any, source: str, number: str) -> Prompt:
    if not isinstance(row, dict):
        raise UserError(f"{source}: must be a JSON object, got a {type(row).__name__}; fix or remove the row")
    ids = (row[key] for key in ID_KEYS if row.get(key) not in (None, ""))
    turns, system = prompt_turns(row, source)
    return Prompt(well_formed(str(next(ids, number))), turns, system, group_of(row, turns))
