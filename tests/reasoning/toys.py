"""A toy task whose states are texts of digits, and scripted models."""

from collections import Counter
from collections.abc import Callable, Sequence

from drafttrain.reasoning.interface import Answer, Call, Then, in_rounds
from drafttrain.reasoning.tasks.task import Ask, Problem, Task


class Toy(Task):
    """A state is the digits of its thoughts; the model's answers decide the next one."""

    name = "toy"
    steps = 3
    scores = (0.0, 10.0)
    keys = {"text": str}

    def problem(self, id, row, source):
        return Problem(id, row["text"], None)

    def think(self, problem, thoughts):
        return {"digit": (yield Ask(f"think {self.digits(thoughts)}", 4))}

    def judge(self, problem, thoughts):
        return Ask(f"judge {self.digits(thoughts)}", 4)

    def score(self, text):
        return float(text) if text.isdecimal() else None

    def render(self, thought):
        return thought["digit"]

    def check(self, problem, thoughts, closing):
        return {"success": True, "digits": self.digits([*thoughts, closing])}

    @staticmethod
    def digits(thoughts) -> str:
        return "".join(thought["digit"] for thought in thoughts)


PROBLEM = Problem("p", "a problem", None)


class Scripted:
    """A model that answers by a function of the prompt and of how often it has occurred in its round before.

    Attributes:
        rounds: the calls of every round.
    """

    def __init__(self, script: Callable[[str, int], str | Answer]):
        self.script = script
        self.rounds: list[list[Call]] = []

    def __call__(self, calls: Sequence[Call], then: Then) -> None:
        in_rounds(self.answer)(calls, then)

    def answer(self, calls: Sequence[Call]) -> list[Answer]:
        self.rounds.append(list(calls))
        seen: Counter[str] = Counter()
        answers = []
        for call in calls:
            answer = self.script(call.messages, seen[call.messages])
            seen[call.messages] += 1
            if isinstance(answer, str):
                answer = Answer(answer, tuple(map(ord, answer)))
            answers.append(answer)
        return answers


def table_model(scores: dict[str, int], failing: Sequence[str] = ()) -> Scripted:
    """Return a model whose k-th thought is the digit k, and whose scores are those of a table (else 0).

    Args:
        failing: prompts whose calls fail; "think 0#1" for the second of equal ones.
    """

    def script(prompt: str, number: int) -> str | Answer:
        if prompt in failing or f"{prompt}#{number}" in failing:
            return Answer("", finish_reason="", error=f"{prompt} failed")
        kind, _, digits = prompt.partition(" ")
        return str(number) if kind == "think" else str(scores.get(digits, 0))

    return Scripted(script)
