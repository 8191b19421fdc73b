"""Evaluation prompts out of the files that benchmarks come in.

What a row is shows in its keys:

    turns                    MT-bench, and the files that EAGLE and Spec-Bench made in its form
    question                 GSM8K
    prompt and entry_point   HumanEval
    text and test_list       MBPP
    prompt                   one prompt
    a chat or instruction    any row that the corpus reader knows: what the user says in it

A .txt file holds one prompt per line. Only the user's words are read, never a reference answer.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from drafttrain.corpus.chat import encode_prompt
from drafttrain.corpus.conversation import Message
from drafttrain.corpus.rows import row_to_conversation
from drafttrain.corpus.streams import Stream, open_streams, read_json_values, read_jsonl, read_lines
from drafttrain.errors import UserError

# HumanEval is code to be continued, and a chat model has to be told so. The words are EAGLE's; one blank line
# always follows here (EAGLE has what the problem itself begins with: nothing, or one to three line ends).
CODE_REQUEST = "Complete the code I provided.\n\n"
# The words of MBPP's authors (Austin et al. 2021, fig. 1).
MBPP_REQUEST = (
    "You are an expert Python programmer, and here is your task: {task} Your code should pass these tests:"
    "\n\n{tests}"
)


@dataclass
class Prompt:
    """What a user says in one chat.

    Attributes:
        id: unique in its file.
        turns: the user's turns; the target answers each before the next is put.
        system: the system prompt, if the row brings one.
    """

    id: str
    turns: list[str]
    system: str | None = None

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

    @property
    def n_turns(self) -> int:
        """Chat turns that are played in all."""
        return sum(min(self.turns, len(prompt.turns)) for prompt in self.prompts)

    @classmethod
    def read(cls, prompts: PromptSet) -> "Task":
        return cls(prompts.name, read_prompts(prompts.path, prompts.limit), prompts.turns)


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """Reads prompts from a .jsonl, .json or .txt file, gzipped or not, or from a folder or archive of such.

    Args:
        limit: how many, from the start; None for all.

    Raises:
        UserError: the file is missing, damaged or not UTF-8, or holds no prompt, or a row has none.
    """
    prompts: list[Prompt] = []
    seen: Counter[str] = Counter()
    for stream in open_streams(path):
        for row, value in _rows(stream):
            if limit is not None and len(prompts) >= limit:
                return prompts
            prompt = _prompt(value, f"{stream.source}:row {row}", str(row))
            seen[prompt.id] += 1
            if seen[prompt.id] > 1:  # ids name measurements, so two prompts must not share one
                prompt.id = f"{prompt.id}#{row}"
            prompts.append(prompt)
    if not prompts:
        raise UserError(f"{path}: holds no prompts; expected rows with turns, question, prompt or a chat")
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
    if stream.suffix == ".txt":
        for row, line in read_lines(stream):
            yield row, {"prompt": line.strip()}
    elif stream.suffix in (".jsonl", ".ndjson"):
        yield from read_jsonl(stream)
    else:
        yield from read_json_values(stream)


def _prompt(row: Any, source: str, number: str) -> Prompt:
    if not isinstance(row, dict):
        raise UserError(f"{source}: a {type(row).__name__} in place of a JSON object; mend or remove the row")
    ids = (
        row[key] for key in ("question_id", "task_id", "id", "conversation_id") if row.get(key) is not None
    )
    name = str(next(ids, number))
    system = None
    if "turns" in row:
        turns = row["turns"] if isinstance(row["turns"], list) else [row["turns"]]
    elif "question" in row:
        turns = [row["question"]]
    elif "prompt" in row:
        turns = [row["prompt"]]
        if "entry_point" in row and isinstance(row["prompt"], str):
            turns = [CODE_REQUEST + row["prompt"].lstrip("\n")]
    elif "text" in row and "test_list" in row:
        turns = [MBPP_REQUEST.format(task=row["text"], tests="\n".join(map(str, row["test_list"])))]
    else:
        chat = row_to_conversation(row, "auto", name, source, Counter(), Counter())
        messages = chat.messages if chat and not chat.is_text else []
        turns = [message.content for message in messages if message.role == "user"]
        system = next((message.content for message in messages if message.role == "system"), None)
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise UserError(
            f"{source}: no prompt in it; give it one under turns, question or prompt, or remove the row"
        )
    return Prompt(name, turns, system)
