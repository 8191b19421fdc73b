"""GSM8K: a thought is a sub-question and its answer; scores are 1 to 10 (SEED, Appendix C). The words of the
prompts are ours, their slots the paper's."""

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from drafttrain.reasoning.tasks.task import Ask, Asking, Problem, Task, Thought, first_line, score_after
from drafttrain.utils.errors import UserError

PROBLEM = "Here is a math word problem.\n\nProblem: {problem}\n\n"
STATE = "Worked out so far:\n{state}\n\n"
NO_STATE = "Nothing has been worked out so far.\n\n"
SUB_QUESTION = (
    "Which smaller question should be answered next on the way to the solution? Write this one question and "
    "nothing else.\n\nNext question:"
)
SUB_ANSWER = (
    "A smaller question that helps to solve it: {sub_question}\n\nAnswer only this smaller question, in one "
    "or two sentences with the calculation.\n\nAnswer:"
)
VALUE = (
    "A smaller question and its answer:\nQuestion: {sub_question}\nAnswer: {sub_answer}\n\nHow much does "
    "this answer help to solve the problem? Rate it with a whole number from 1 (wrong or useless) to 10 "
    "(right and decisive). Write the number only."
)
RATING = "Rating: "  # small models rarely write a number unless their turn begins with this, space included
CLOSING = (
    "Now finish the problem with what has been worked out. End with a line that has the form "
    '"#### number".\n\nSolution:'
)
MARK = "####"
_NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")


class Gsm8k(Task):
    """Grade-school math."""

    name = "gsm8k"
    steps = 3
    scores = (1.0, 10.0)
    keys = {"question": str, "answer": str}

    def problem(self, id: str, row: dict[str, Any], source: str) -> Problem:
        _, mark, last = row["answer"].rpartition(MARK)
        reference = final_number(last) if mark else None
        if reference is None:
            raise UserError(
                f"{source}: answer must end with {MARK} and a number, got {row['answer'][-40:]!r}"
            )
        return Problem(id, row["question"], str(reference))

    def think(self, problem: Problem, thoughts: Sequence[Thought]) -> Asking[Thought]:
        asked = yield Ask(_context(problem, thoughts) + SUB_QUESTION, 64, ("\n\n",))
        question = first_line(asked)
        prompt = PROBLEM.format(problem=problem.text) + SUB_ANSWER.format(sub_question=question)
        answer = yield Ask(prompt, 160, ("\n\n",))
        return {"sub_question": question, "sub_answer": answer.strip()}

    def close(self, problem: Problem, thoughts: Sequence[Thought]) -> Asking[Thought]:
        text = yield Ask(_context(problem, thoughts) + CLOSING, 256)
        return {"solution": text.strip()}

    def judge(self, problem: Problem, thoughts: Sequence[Thought]) -> Ask:
        return Ask(PROBLEM.format(problem=problem.text) + VALUE.format(**thoughts[-1]), 16, ("\n\n",), RATING)

    def score(self, text: str) -> float | None:
        return score_after(RATING, text, self.scores)

    def render(self, thought: Thought) -> str:
        return f"{thought['sub_question']} {thought['sub_answer']}"

    def check(self, problem: Problem, thoughts: Sequence[Thought], closing: Thought) -> dict[str, Any]:
        found = final_number(closing["solution"])
        success = found is not None and found == Decimal(problem.reference)
        answer = None if found is None else str(found)
        return {"success": success, "answer": answer, "reference": problem.reference}


def final_number(text: str) -> Decimal | None:
    """Return the number after the last "####" of a solution, else its last number; None without any."""
    after = text.rpartition(MARK)[2] if MARK in text else ""
    numbers = _NUMBER.findall(after)[:1] or _NUMBER.findall(text)[-1:]
    try:
        return Decimal(re.sub(r"[$,]", "", numbers[0])) if numbers else None
    except InvalidOperation:
        return None


def _context(problem: Problem, thoughts: Sequence[Thought]) -> str:
    """Return the common beginning of prompts: the problem and the thoughts so far."""
    steps = (f"{n}. {one['sub_question']}\n   {one['sub_answer']}" for n, one in enumerate(thoughts, 1))
    state = STATE.format(state="\n".join(steps)) if thoughts else NO_STATE
    return PROBLEM.format(problem=problem.text) + state
