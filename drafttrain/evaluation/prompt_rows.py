"""What the user says in a row of a benchmark's file. What a row is shows in its keys:

    turns                       MT-bench, and the files that EAGLE and Spec-Bench made in its form
    translation                 WMT14, by language
    article (and highlights)    CNN/Daily Mail
    passage and question        DROP, as on the Hub
    context and completion      DROP, as simple-evals has it
    question and choices        MMLU
    text or prompt, test_list   MBPP
    question                    GSM8K, Natural Questions, TriviaQA
    prompt and entry_point      HumanEval
    prompt                      one prompt, or the turns of one chat (MT-bench, as on the Hub)
    a chat or instruction       any row that the corpus reader knows (Alpaca): what the user says in it

Only the user's words are read, never a reference answer.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from drafttrain.corpus.rows import is_exchange, row_to_conversation
from drafttrain.errors import UserError

# HumanEval is code to be continued, and a chat model has to be told so. The words are EAGLE's; one blank line
# always follows here (EAGLE has what the problem itself begins with: nothing, or one to three line ends).
CODE_REQUEST = "Complete the code I provided.\n\n"
# The words of MBPP's authors (Austin et al. 2021, fig. 1).
MBPP_REQUEST = (
    "You are an expert Python programmer, and here is your task: {task} Your code should pass these tests:"
    "\n\n{tests}"
)
TRANSLATION_REQUEST = "Translate {source} to {target}: {text}"  # Spec-Bench's words, as the next
SUMMARY_REQUEST = "Summarize: {text}"
DROP_REQUEST = "Passage: {passage}\nQuestion: {question}\nAnswer:"  # as simple-evals has it
# ours: an answer of one letter would leave nothing to draft
MMLU_REQUEST = "Answer this multiple choice question about {subject}, and say why.\n\n{question}\n{choices}"

LANGUAGES = {
    "cs": "Czech",
    "de": "German",
    "en": "English",
    "es": "Spanish",
    "fr": "French",
    "hi": "Hindi",
    "ru": "Russian",
}
# Spec-Bench spreads MT-bench over these
MT_BENCH = "mt_bench"
MT_BENCH_CATEGORIES = {
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
}


def prompt_turns(row: dict[str, Any], source: str) -> tuple[list[str], str | None]:
    """The user's turns, and the system prompt if the row brings one.

    Args:
        source: file and row, for messages.

    Raises:
        UserError: there is no prompt in it.
    """
    form = next((form for keys, form in FORMS if keys <= row.keys()), None)
    system, turns = None, []
    try:
        if form is None:
            system, turns = _chat(row, source)
        else:
            turns = form(row)
    except (AttributeError, KeyError, TypeError, StopIteration):
        pass  # the keys are a benchmark's, what they hold is not
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise UserError(
            f"{source}: no prompt in it; give it one under turns, question or prompt, or remove the row"
        )
    return turns, system


def group_of(row: dict[str, Any]) -> str | None:
    """The part of its benchmark that a row belongs to, by its key `category`; MT-bench is one part."""
    category = row.get("category")
    if not isinstance(category, str) or not category.strip():
        return None
    return MT_BENCH if category in MT_BENCH_CATEGORIES else category.strip()


def _turns(row: dict) -> list:
    return row["turns"] if isinstance(row["turns"], list) else [row["turns"]]


def _prompt(row: dict) -> list:
    return row["prompt"] if isinstance(row["prompt"], list) else [row["prompt"]]


def _translation(row: dict) -> list:
    """Into English where it is one of the two, else from the first into the second."""
    codes = list(row["translation"])
    source = next(code for code in codes if code != "en" or len(codes) == 1)
    target = "en" if "en" in codes else next(code for code in codes if code != source)
    names = {"source": LANGUAGES.get(source, source), "target": LANGUAGES.get(target, target)}
    text = row["translation"][source]
    return [TRANSLATION_REQUEST.format(**names, text=text.strip())] if text.strip() else []


def _summary(row: dict) -> list:
    return [SUMMARY_REQUEST.format(text=row["article"].strip())] if row["article"].strip() else []


def _mmlu(row: dict) -> list:
    choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCDEFGH", row["choices"]))
    subject = str(row.get("subject") or "general knowledge").replace("_", " ")
    return [MMLU_REQUEST.format(subject=subject, question=row["question"].strip(), choices=choices)]


def _mbpp(row: dict) -> list:
    tests = "\n".join(map(str, row["test_list"]))
    return [MBPP_REQUEST.format(task=row["text"] if "text" in row else row["prompt"], tests=tests)]


def _question(row: dict) -> list:
    question = row["question"]
    return [question["text"] if isinstance(question, dict) else question]  # Natural Questions as a whole


def _chat(row: dict, source: str) -> tuple[str | None, list[str]]:
    if not is_exchange(row):
        return None, []
    chat = row_to_conversation(row, "auto", source, source, Counter(), Counter())
    messages = chat.messages if chat and not chat.is_text else []
    system = next((message.content for message in messages if message.role == "system"), None)
    return system, [message.content for message in messages if message.role == "user"]


# the first whose keys a row has
FORMS: list[tuple[set[str], Callable[[dict], list]]] = [
    ({"turns"}, _turns),
    ({"translation"}, _translation),
    ({"article"}, _summary),
    ({"passage", "question"}, lambda row: [DROP_REQUEST.format_map(row)]),
    ({"context", "completion"}, lambda row: [row["context"]]),
    ({"question", "choices"}, _mmlu),
    ({"text", "test_list"}, _mbpp),
    ({"prompt", "test_list"}, _mbpp),
    ({"question"}, _question),
    ({"prompt", "entry_point"}, lambda row: [CODE_REQUEST + row["prompt"].lstrip("\n")]),
    ({"prompt"}, _prompt),
]
