"""Creative writing: a thought is a plan and a passage of four paragraphs that end in given sentences; the
score is its coherency, 1 to 10 (SEED, Appendix C). The words of the prompts are ours, their slots the
paper's."""

import re
from collections.abc import Sequence
from typing import Any

from drafttrain.data.overlap import fold
from drafttrain.reasoning.tasks.task import Ask, Asking, Problem, Task, Thought, score_after
from drafttrain.utils.errors import UserError

PARAGRAPHS = 4
REQUEST = (
    "Compose a short text of four paragraphs that reads as one story. The paragraphs have to end with these "
    "sentences, one each and in this order:\n{sentences}\n\n"
)
PLAN = (
    'Think of a plan first. Answer in two parts: after "Plan:" two or three sentences about the story, and '
    'after "Passage:" the four paragraphs, with a blank line between them.'
)
STATE = (
    "This is the plan:\n{plan}\n\nA first draft:\n{passage}\n\nWrite the final text by this plan: four "
    "paragraphs with a blank line between them, and nothing else."
)
VALUE = (
    "Here is a text of several paragraphs.\n\n{passage}\n\nHow well do the paragraphs fit together? Begin "
    'with the line "Coherency score: N", where N is a whole number from 1 to 10. Then say why in two or '
    "three sentences."
)
LABEL = "Coherency score: "


class Writing(Task):
    """Creative writing."""

    name = "writing"
    steps = 1
    scores = (1.0, 10.0)
    keys = {"prompt": str, "end_sentences": list}

    def problem(self, id: str, row: dict[str, Any], source: str) -> Problem:
        sentences = row["end_sentences"]
        if len(sentences) != PARAGRAPHS or not all(isinstance(one, str) and one.strip() for one in sentences):
            raise UserError(
                f"{source}: end_sentences must be {PARAGRAPHS} texts, got {len(sentences)} values"
            )
        return Problem(id, row["prompt"], tuple(sentences))

    def think(self, problem: Problem, thoughts: Sequence[Thought]) -> Asking[Thought]:
        sentences = "\n".join(f"{n}. {text}" for n, text in enumerate(problem.reference, 1))
        request = REQUEST.format(sentences=sentences)
        if not thoughts:
            text = yield Ask(request + PLAN, 512)
            plan, passage = _parts(text)
            return {"plan": plan, "passage": passage}
        plan = thoughts[0]["plan"]
        text = yield Ask(request + STATE.format(plan=plan, passage=thoughts[-1]["passage"]), 512)
        return {"plan": plan, "passage": _parts(text)[1]}

    def judge(self, problem: Problem, thoughts: Sequence[Thought]) -> Ask:
        return Ask(VALUE.format(passage=thoughts[-1]["passage"]), 160, (), LABEL)

    def score(self, text: str) -> float | None:
        return score_after(LABEL, text, self.scores)

    def render(self, thought: Thought) -> str:
        return f"Plan: {thought['plan']}\n{thought['passage']}"

    def check(self, problem: Problem, thoughts: Sequence[Thought], closing: Thought) -> dict[str, Any]:
        kept = end_sentences_kept(closing["passage"], problem.reference)
        return {"success": kept == PARAGRAPHS, "end_sentences_kept": kept, "of": PARAGRAPHS}


def end_sentences_kept(passage: str, sentences: Sequence[str]) -> int:
    """Return how many paragraphs end with their sentence; case, punctuation and spaces do not count."""
    paragraphs = [text for text in re.split(r"\n\s*\n", passage.strip()) if text.strip()]
    if len(paragraphs) < len(sentences):  # without blank lines between them
        paragraphs = [text for text in passage.split("\n") if text.strip()]
    return sum(
        f" {fold(text)}".endswith(f" {fold(sentence)}") for text, sentence in zip(paragraphs, sentences)
    )


def _parts(text: str) -> tuple[str, str]:
    """Return plan and passage of an answer; without the word "Passage:" all of it is the passage."""
    plan, *passage = re.split(r"\**passage:\**", text, maxsplit=1, flags=re.IGNORECASE)
    if not passage:
        return "", text.strip()
    return re.sub(r"^\s*\**plan:\**", "", plan, flags=re.IGNORECASE).strip(), passage[0].strip()
