"""The interface of a task: prompts of the thought generator and the state evaluator, problems, checks.

A thought may take several calls, each of which needs the previous answer. So functions that make a thought
are generators: they yield the next `Ask`, are sent the text of its answer, and return the result.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from drafttrain.data.prompts import read_rows, spread
from drafttrain.data.rows import well_formed
from drafttrain.utils.errors import UserError

T = TypeVar("T")
Thought = dict[str, str]  # the named texts of one step, such as sub-question and sub-answer
_NUMBER = r"(-?\d+(?:\.\d+)?)(?!\w|[.,]\d|\s+(?:paragraphs|sentences|to\s+\d))"  # not as part of more
_ANNOUNCED = (  # a number, or words that announce one and the number
    r"(?:(?:(?:an?|the|this|my|its|overall|final|coherency)\s+)*(?:score|rating|number)"
    r"(?:\s+(?:an?|the|this|these|of|for|text|passage|paragraphs|answer|is|would|be))*"
    r"|i(?:\s+would|['’]d)?\s+(?:give|rate)\s+(?:it|this)(?:\s+an?)?)?[\W_]*?"
)
_BETWEEN = (  # words of the same sentence that may come between a label within an answer and the number
    r"(?:(?:[^\w.!?]|_)+(?:an?|the|this|that|these|its?|of|for|i|d|give|rate|is|will|would|should|be|my"
    r"|overall|final|score|rating|number|text|passage|story|four|paragraphs|answer)\b)*(?:[^\w.!?]|_)*?"
)


@dataclass(frozen=True)
class Ask:
    """A prompt, the token limit of its answer, the stop texts, what the model's turn begins with (the answer
    is its continuation), and whether the state evaluator asks."""

    prompt: str
    max_new_tokens: int
    stop: tuple[str, ...] = ()
    begin: str = ""
    evaluates: bool = False


Asking = Generator[Ask, str, T]


@dataclass(frozen=True)
class Problem:
    """One problem of a task.

    Attributes:
        id: unique in its file.
        text: as shown in prompts.
        reference: what results are checked against.
    """

    id: str
    text: str
    reference: Any


class Task(ABC):
    """Prompts, problems and checks of one task.

    Attributes:
        name: in recipes.
        steps: levels of thoughts by default; the closing generation is one more level of the tree.
        scores: the lowest and the highest score of the state evaluator.
        keys: required keys of a row of its problem file, with their types.
    """

    name: str
    steps: int
    scores: tuple[float, float]
    keys: dict[str, type]

    def read(self, path: str | Path, limit: int | None = None) -> list[Problem]:
        """Read a file of problems.

        Args:
            limit: how many, evenly spaced; None for all.

        Raises:
            UserError: the file is missing, damaged, empty or of another task.
        """
        problems = []
        for number, source, row in read_rows(path):
            if not isinstance(row, dict) or not all(
                isinstance(row.get(key), kind) and row[key] for key, kind in self.keys.items()
            ):
                given = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
                raise UserError(
                    f"{source}: must be a problem of {self.name} with {' and '.join(self.keys)}, got {given}"
                    "; name a file of this task"
                )
            name = well_formed(str(row.get("id", number)))
            if "\0" in name:
                raise UserError(f"{source}: id must be the name of a file, got {name!r}; rename it")
            problems.append(self.problem(name, _repaired(row), source))
        if not problems:
            raise UserError(f"{path}: must hold problems of {self.name}, got none")
        return spread(problems, limit)

    @abstractmethod
    def problem(self, id: str, row: dict[str, Any], source: str) -> Problem:
        """Return the problem of a row that has the task's keys.

        Raises:
            UserError: the row is damaged.
        """

    @abstractmethod
    def think(self, problem: Problem, thoughts: Sequence[Thought]) -> Asking[Thought]:
        """Generate one more thought after those on the path (G in Algorithm 1)."""

    def close(self, problem: Problem, thoughts: Sequence[Thought]) -> Asking[Thought]:
        """Make the closing generation after the thoughts of the best leaf; by default one more thought."""
        return self.think(problem, thoughts)

    @abstractmethod
    def judge(self, problem: Problem, thoughts: Sequence[Thought]) -> Ask:
        """Return the prompt that asks for the score of the newest thought (E in Algorithm 1)."""

    @abstractmethod
    def score(self, text: str) -> float | None:
        """Return the score in an answer to `judge`, after the answer's given beginning; None without one."""

    @abstractmethod
    def render(self, thought: Thought) -> str:
        """Return a thought as text for the prompt of a vote."""

    @abstractmethod
    def check(self, problem: Problem, thoughts: Sequence[Thought], closing: Thought) -> dict[str, Any]:
        """Compare the result of a tree with the problem's reference.

        Args:
            thoughts: of the best leaf's path.
            closing: the closing generation.

        Returns:
            "success" (bool), and details.
        """


def first_line(text: str) -> str:
    """Return the first line of a text that is not blank, or ""."""
    return next((line.strip() for line in text.split("\n") if line.strip()), "")


def score_after(label: str, text: str, limits: tuple[float, float]) -> float | None:
    """Return the number that follows a label, at once or after words that only announce it ("8/10", "**8**",
    "The coherency score is 8.", "I would give it an 8"), if it is within limits; else None.

    Args:
        label: such as "Rating: ".
        text: after the label; it may repeat it, and the number may follow there, at once or after words such
            as "of" and "for this text is".
    """
    words = rf"\b{re.escape(label.strip(': '))}\b"
    found = re.match(rf"{words}[\W_]*?{_ANNOUNCED}{_NUMBER}", label + text, re.IGNORECASE)
    found = found or re.search(words + _BETWEEN + _NUMBER, text, re.IGNORECASE)
    return float(found[1]) if found and limits[0] <= float(found[1]) <= limits[1] else None


def _repaired(value: Any) -> Any:
    """Return a JSON value, with its strings repaired so that UTF-8 can encode them."""
    if isinstance(value, dict):
        return {key: _repaired(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_repaired(one) for one in value]
    return well_formed(value) if isinstance(value, str) else value
