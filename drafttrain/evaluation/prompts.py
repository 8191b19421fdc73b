"""Evaluation prompts: sets of them, read out of the files that benchmarks come in.

What a row holds is `prompt_rows.py`'s business. A .txt or .tsv file holds one prompt per line, or a question
and, after a tab, its answers (TriviaQA); a .csv file is one of MMLU's.
"""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path, PurePosixPath
from typing import Any

from transformers import PreTrainedTokenizerBase

from drafttrain.corpus.chat import encode_prompt
from drafttrain.corpus.conversation import Message
from drafttrain.corpus.streams import Stream, open_streams, read_json_values, read_jsonl, read_lines, readable
from drafttrain.errors import UserError
from drafttrain.evaluation.prompt_rows import group_of, prompt_turns

MMLU_TEST = "_test.csv"  # its archive holds val and dev beside it


@dataclass
class Prompt:
    """What a user says in one chat.

    Attributes:
        id: unique in its file.
        turns: the user's turns; the target answers each before the next is put.
        system: the system prompt, if the row brings one.
        group: the part of its benchmark that it belongs to, if the row says so.
    """

    id: str
    turns: list[str]
    system: str | None = None
    group: str | None = None

    def token_ids(self, tokenizer: PreTrainedTokenizerBase, answers: Sequence[str] = ()) -> list[int]:
        """Ids of the chat up to the answer that comes next.

        Args:
            answers: what the target answered to the first turns.

        Raises:
            UserError: several turns or a system prompt, and the tokenizer has no chat template.
        """
        if not tokenizer.chat_template and self.system is None and not answers:
            return tokenizer(self.turns[0])["input_ids"]  # a base model continues the text
        messages = [] if self.system is None else [Message("system", self.system)]
        for turn, answer in zip(self.turns, answers):
            messages += [Message("user", turn), Message("assistant", answer)]
        return encode_prompt(tokenizer, [*messages, Message("user", self.turns[len(answers)])])


@dataclass
class PromptSet:
    """One set of evaluation prompts.

    Attributes:
        name: name of the row in the result table.
        path: file of prompts.
        limit: how many to take from its start. null: all.
        turns: how many turns of each chat are played (MT-bench has two); the target answers the earlier ones.
    """

    name: str
    path: str
    limit: int | None = None
    turns: int = 1


@dataclass
class Task:
    """A prompt set that has been read."""

    name: str
    prompts: list[Prompt]
    turns: int = 1

    def parts(self) -> list["Task"]:
        """The task itself, or one for each group of its prompts where it has several (Spec-Bench)."""
        by_group: dict[str, list[Prompt]] = {}
        for prompt in self.prompts:
            by_group.setdefault(prompt.group or "other", []).append(prompt)
        if len(by_group) < 2:
            return [self]
        return [Task(f"{self.name}/{group}", prompts, self.turns) for group, prompts in by_group.items()]

    @property
    def n_turns(self) -> int:
        """Chat turns that are played in all."""
        return sum(min(self.turns, len(prompt.turns)) for prompt in self.prompts)

    @classmethod
    def read(cls, prompts: PromptSet) -> "Task":
        return cls(prompts.name, read_prompts(prompts.path, prompts.limit), prompts.turns)


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Reads prompts from a .jsonl, .json, .csv, .tsv or .txt file, gzipped or not, or from a folder or
    archive of such. Of MMLU's archive only the test split is read.

    Args:
        limit: how many, from the start; None for all.

    Raises:
        UserError: the file is missing, damaged or not UTF-8, or holds no prompt, or a row has none.
    """
    is_mmlu = any(stream.name.endswith(MMLU_TEST) for stream in open_streams(path))
    streams = (stream for stream in open_streams(path) if not is_mmlu or stream.name.endswith(MMLU_TEST))
    rows = ((row, f"{stream.source}:row {row}", value) for stream in streams for row, value in _rows(stream))
    prompts = make_prompts(rows, limit)
    if not prompts:
        raise UserError(f"{path}: holds no prompts; expected rows with turns, question, prompt or a chat")
    return prompts


def make_prompts(rows: Iterable[tuple[int, str, Any]], limit: int | None = None) -> list[Prompt]:
    """Prompts with unique ids out of rows: number, source for messages, value.

    Raises:
        UserError: a row has no prompt.
    """
    prompts: list[Prompt] = []
    taken: set[str] = set()
    for number, source, value in rows:
        if limit is not None and len(prompts) >= limit:
            break
        prompt = _prompt(value, source, str(number))
        if prompt.id in taken:  # ids name measurements, so two prompts must not share one
            again = f"{prompt.id}#{number}"
            others = (f"{again}#{i}" for i in count(2))  # several files have a row of this number
            prompt.id = next(name for name in chain([again], others) if name not in taken)
        taken.add(prompt.id)
        prompts.append(prompt)
    return prompts


def first_of_each(tasks: Sequence[Task], n: int) -> list[Task]:
    """The first n prompts, taken from all tasks in turn."""
    taken = {task.name: 0 for task in tasks}
    while n and any(taken[task.name] < len(task.prompts) for task in tasks):
        for task in tasks:
            if n and taken[task.name] < len(task.prompts):
                taken[task.name] += 1
                n -= 1
    return [Task(task.name, task.prompts[: taken[task.name]]) for task in tasks if taken[task.name]]


def spread(prompts: Sequence[Prompt], n: int | None) -> list[Prompt]:
    """n prompts at equal distances, so that all categories of a file are among them; None: all."""
    n = len(prompts) if n is None else min(n, len(prompts))
    return [prompts[i * len(prompts) // n] for i in range(n)]


def _rows(stream: Stream) -> Iterator[tuple[int, Any]]:
    if stream.suffix in (".txt", ".tsv"):
        for row, line in read_lines(stream):
            question, _, answers = line.partition("\t")
            is_trivia = answers.lstrip('"').startswith("[")
            yield row, {"prompt": (question if is_trivia else line).strip()}
    elif stream.suffix == ".csv":
        yield from _mmlu_rows(stream)
    elif stream.suffix in (".jsonl", ".ndjson"):
        yield from read_jsonl(stream)
    else:
        yield from read_json_values(stream)


def _mmlu_rows(stream: Stream) -> Iterator[tuple[int, Any]]:
    """Rows of one of MMLU's files: question, four choices and the answer's letter, without a header."""
    name = PurePosixPath(stream.name).stem
    with readable(stream.source):
        text = io.StringIO(stream.bytes.read().decode("utf-8-sig"), newline="")
    for row, cells in enumerate(csv.reader(text), 1):
        if len(cells) != 6 or cells[5] not in ("A", "B", "C", "D"):
            raise UserError(
                f"{stream.source}:row {row}: not as in MMLU (question, four choices, letter of the answer); "
                "write other prompts as .jsonl"
            )
        subject = name.rpartition("_")[0] or name
        yield row, {"id": f"{name}-{row}", "question": cells[0], "choices": cells[1:5], "subject": subject}


def _prompt(row: Any, source: str, number: str) -> Prompt:
    if not isinstance(row, dict):
        raise UserError(f"{source}: a {type(row).__name__} in place of a JSON object; mend or remove the row")
    ids = (
        row[key] for key in ("question_id", "task_id", "id", "conversation_id") if row.get(key) is not None
    )
    turns, system = prompt_turns(row, source)
    return Prompt(str(next(ids, number)), turns, system, group_of(row))
