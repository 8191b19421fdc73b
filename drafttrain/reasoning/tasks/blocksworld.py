"""Blocksworld: a thought is the next action of a plan, the score good or bad (SEED, Appendix C). The words of
the prompts and the demonstrations are ours, the slots the paper's."""

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from drafttrain.reasoning.tasks import blocks
from drafttrain.reasoning.tasks.blocks import Blocks
from drafttrain.reasoning.tasks.task import Ask, Asking, Problem, Task, Thought, first_line
from drafttrain.utils.errors import UserError

RULES = """A robot hand moves blocks that are piled up on a table. It knows four actions:
pick up block X: takes block X from the table
unstack block X from block Y: takes block X off the top of block Y
put down block X: puts block X, which the hand holds, on the table
stack block X on block Y: puts block X, which the hand holds, on top of block Y

An action is possible only in these conditions:
- The hand holds one block at most. It is empty before it picks up or unstacks a block, and empty again \
after it has put down or stacked one.
- Only a block with nothing on top of it, a clear block, can be picked up or unstacked: from the table it is \
picked up, from another block it is unstacked.
- A block can be stacked on a clear block only.

"""
TURNED = """(define (problem turned) (:domain blocksworld-4ops) (:objects a b c)
(:init (handempty) (clear a) (clear c) (ontable b) (ontable c) (on a b)) (:goal (and (on b c))))"""
TOWER = """(define (problem tower) (:domain blocksworld-4ops) (:objects a b c d)
(:init (handempty) (clear a) (clear c) (ontable b) (ontable d) (on a b) (on c d))
(:goal (and (on a d) (on c a))))"""
# demonstrations, none of which is a stored problem with other names: problem and plan
DEMONSTRATIONS = (
    (TURNED, "(unstack a b)\n(put-down a)\n(pick-up b)\n(stack b c)"),
    (TOWER, "(unstack c d)\n(put-down c)\n(unstack a b)\n(stack a d)\n(pick-up c)\n(stack c a)"),
)
# problem, how many actions of its plan come first, the action judged, and the verdict
VERDICTS = (
    (0, 0, "(pick-up b)", "bad"),  # not possible: block a is on it
    (0, 2, "(pick-up b)", "good"),
    (1, 1, "(stack c a)", "bad"),  # possible, but block a has to move first
    (1, 3, "(stack a d)", "good"),
)
STATEMENT = "[PROBLEM]\n{problem}\n[PLAN]\n{state}"
NEXT = (
    "\n\nContinue the last plan with its next action. Write this one action and nothing else.\n\nNext action:"
)
QUESTION = (
    "Is an action a good next one for a plan? It is good if it is possible and leads towards the goal, else "
    "it is bad.\n\n"
)
JUDGED = "[PROBLEM]\n{problem}\n[PLAN SO FAR]\n{state}\n[NEXT ACTION]\n{action}\n[VERDICT]"
ANSWER = "\n\nGive the last verdict, good or bad, in one word."
VERDICT = "Verdict:"
BEFORE = "a an the this that it it's is was would be very really next last action step move verdict".split()
NOTHING = "(no action yet)"


class Blocksworld(Task):
    """Blocksworld, planned in six thoughts of one action each and the closing action."""

    name = "blocksworld"
    steps = 6
    scores = (0.0, 1.0)
    keys = {"prompt": str, "pddl": str, "plan": str}

    def problem(self, id: str, row: dict[str, Any], source: str) -> Problem:
        """Return a problem with its parsed `Blocks` as the reference.

        Raises:
            UserError: damaged PDDL; a plan that names unknown blocks or does not reach the goal.
        """
        found = blocks.read_pddl(row["pddl"], source)
        if reason := blocks.check_plan(found, blocks.read_plan(row["plan"], found, source)):
            raise UserError(f"{source}: plan must reach the goal, got one where {reason}")
        return Problem(id, blocks.describe(found), found)

    def think(self, problem: Problem, thoughts: Sequence[Thought]) -> Asking[Thought]:
        text = yield Ask(generator_prompt(problem, thoughts), 32, ("\n\n",))
        action = blocks.read_action(text)
        return {"action": blocks.in_words(action) if action else first_line(text)}

    def judge(self, problem: Problem, thoughts: Sequence[Thought]) -> Ask:
        return Ask(evaluator_prompt(problem, thoughts), 16, ("\n\n",), VERDICT)

    def score(self, text: str) -> float | None:
        """Return 1 for good and 0 for bad, reversed in "not good" and "isn't bad". The verdict must be the
        answer's first word or follow only words such as "The action is"; else return None."""
        is_negated = False
        for found in re.findall(r"[\w'’]+", text.lower()):
            word = found.replace("’", "'").strip("'_")
            if word in ("good", "bad"):
                return float((word == "good") != is_negated)
            if word == "not" or word.endswith("n't"):
                is_negated = True
            elif word not in BEFORE:
                return None
        return None

    def render(self, thought: Thought) -> str:
        return thought["action"]

    def check(self, problem: Problem, thoughts: Sequence[Thought], closing: Thought) -> dict[str, Any]:
        """Return the plan up to the action that reaches the goal, else all of it and why it fails."""
        known: Blocks = problem.reference
        texts = [thought["action"] for thought in (*thoughts, closing)]
        plan = list(takewhile(bool, map(blocks.read_action, texts)))
        n = blocks.actions_to_goal(known, plan)
        reason = None if n is not None else blocks.check_plan(known, plan)
        return {"success": n is not None, "plan": texts[: n if n is not None else None], "reason": reason}


def generator_prompt(problem: Problem, thoughts: Sequence[Thought]) -> str:
    """Return the prompt that asks for the next action: rules, demonstrations, problem and plan so far."""
    parts = [RULES]
    for pddl, plan in DEMONSTRATIONS:
        known = blocks.read_pddl(pddl, "demonstration")
        actions = [blocks.in_words(action) for action in blocks.read_plan(plan, known, "demonstration")]
        parts.append(STATEMENT.format(problem=blocks.describe(known), state="\n".join(actions)) + "\n\n")
    state = "\n".join(thought["action"] for thought in thoughts) or NOTHING
    return "".join(parts) + STATEMENT.format(problem=problem.text, state=state) + NEXT


def evaluator_prompt(problem: Problem, thoughts: Sequence[Thought]) -> str:
    """Return the prompt that asks for the newest action's score, with demonstrations of both verdicts."""
    parts = [RULES, QUESTION]
    for number, taken, action, verdict in VERDICTS:
        pddl, plan = DEMONSTRATIONS[number]
        known = blocks.read_pddl(pddl, "demonstration")
        actions = [*plan.split("\n")[:taken], action]
        words = [blocks.in_words(a) for a in blocks.read_plan("\n".join(actions), known, "demonstration")]
        parts.append(f"{_judged(blocks.describe(known), words)} {verdict}\n\n")
    words = [thought["action"] for thought in thoughts]
    return "".join(parts) + _judged(problem.text, words) + ANSWER


def _judged(problem: str, actions: Sequence[str]) -> str:
    state = "\n".join(actions[:-1]) or NOTHING
    return JUDGED.format(problem=problem, state=state, action=actions[-1])
