"""Get the user's turns from a row of a benchmark's file. Rows are recognized by their keys (`FORMS`, at the
end); for any other row that the corpus reader knows, such as a chat or Alpaca's, they are its user turns.

Reference answers are never read.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any

from drafttrain.data.rows import is_exchange, row_to_conversation, well_formed
from drafttrain.utils.errors import UserError

# HumanEval is code to be continued, which a chat model has to be asked for. The words are EAGLE's, but always
# followed by one blank line (EAGLE keeps the line ends that the problem itself begins with, up to three).
CODE_REQUEST = "Complete the code I provided.\n\n"
# The words of MBPP's authors (Austin et al. 2021, fig. 1).
MBPP_REQUEST = (
    "You are an expert Python programmer, and here is your task: {task} Your code should pass these tests:"
    "\n\n{tests}"
)
TRANSLATION_REQUEST = "Translate {source} to {target}: {text}"  # Spec-Bench's words, as in the next one
SUMMARY_REQUEST = "Summarize: {0}"
DROP_REQUEST = "Passage: {0}\nQuestion: {1}\nAnswer:"  # as in simple-evals
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
# Spec-Bench has these categories in place of MT-bench
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


@dataclass(frozen=True)
class Form:
    """The form of a benchmark's rows, and how they become prompts.

    Attributes:
        keys: a row that has all of them is of this form.
        words: returns the row's own texts that make up its prompt.
        ask: returns the user's turns from the row and its words. None: the words are the turns.
    """

    keys: set[str]
    words: Callable[[dict], list]
    ask: Callable[[dict, list[str]], list[str]] | None = None


def flatten(value: Any) -> Iterator[Any]:
    """Yield the rows in one value of a JSON file: the value itself, or the rows nested in it, as in the
    original files of DROP and TriviaQA."""
    if isinstance(value, dict) and isinstance(value.get("Data"), list):
        for item in (item for item in value["Data"] if isinstance(item, dict)):
            yield {"id": item.get("QuestionId"), "question": item.get("Question")}
    elif isinstance(value, dict) and value and all(map(_is_drop_passage, value.values())):
        for passage in value.values():
            for pair in (pair for pair in passage["qa_pairs"] if isinstance(pair, dict)):
                question = {"passage": passage["passage"], "question": pair.get("question")}
                yield {"id": pair.get("query_id"), **question}
    else:
        yield value


def prompt_turns(row: dict[str, Any], source: str) -> tuple[list[str], str | None]:
    """Return the user's turns, and the system prompt if the row has one.

    Args:
        source: file and row, for messages.

    Raises:
        UserError: the row has no prompt.
    """
    form, system = _form_of(row), None
    if form is None:
        system, turns = _chat(row, source)
    else:
        turns = _words(form, row)
        if form.ask is not None and _are_texts(turns):
            try:
                turns = form.ask(row, turns)
            except (AttributeError, StopIteration, TypeError):
                turns = []  # the keys are a benchmark's, their values are not
    if not _are_texts(turns):
        raise _no_prompt(source)
    return [well_formed(turn) for turn in turns], system


def prompt_words(row: dict[str, Any], source: str) -> list[str]:
    """Return the row's own texts in its prompt, without the request that `prompt_turns` adds; empty texts are
    left out.

    Raises:
        UserError: the prompt is missing or is not text.
    """
    form = _form_of(row)
    if form is None:
        return prompt_turns(row, source)[0]
    words = _words(form, row)
    if not words or not all(isinstance(text, str) for text in words):
        raise _no_prompt(source)
    return [text for text in words if text.strip()]


def is_one_turn(row: dict[str, Any]) -> bool:
    """Return whether `prompt_words` of a row are all parts of one turn, not turns."""
    form = _form_of(row)
    return form is not None and form.ask is not None


def is_known(row: dict[str, Any]) -> bool:
    """Return whether a row has the keys of a benchmark or a chat, with any values."""
    return _form_of(row) is not None or is_exchange(row)


def group_of(row: dict[str, Any], turns: Sequence[str]) -> str | None:
    """Return the part of its benchmark that a row belongs to, from its key `category`; MT-bench is one part.

    Args:
        turns: of the row. MT-bench has two, unlike EAGLE's GSM8K, whose category is "math" too.
    """
    category = row.get("category")
    if not isinstance(category, str) or not category.strip():
        return None
    is_mt_bench = category in MT_BENCH_CATEGORIES and len(turns) > 1
    return MT_BENCH if is_mt_bench else category.strip()


def _form_of(row: dict) -> Form | None:
    """Return the first form whose keys a row has."""
    return next((form for form in FORMS if form.keys <= row.keys()), None)


def _words(form: Form, row: dict) -> list:
    try:
        return form.words(row)
    except (AttributeError, KeyError, TypeError):
        return []  # the keys are a benchmark's, their values are not


def _are_texts(turns: list) -> bool:
    return bool(turns) and all(isinstance(text, str) and text.strip() for text in turns)


def _no_prompt(source: str) -> UserError:
    return UserError(
        f"{source}: no prompt in it; give it one under turns, question or prompt, or remove the row"
    )


def _chat(row: dict, source: str) -> tuple[str | None, list[str]]:
    """Return the system prompt and the user's turns of a row that the corpus reader knows."""
    if not is_exchange(row):
        return None, []
    asked = {key: value for key, value in row.items() if key != "label"}  # it is about the answer
    chat = row_to_conversation(asked, "auto", source, source, Counter(), Counter())
    messages = [m for m in chat.messages if m.content.strip()] if chat and not chat.is_text else []
    system = next((message.content for message in messages if message.role == "system"), None)
    return system, [message.content for message in messages if message.role == "user"]


def _is_drop_passage(value: Any) -> bool:
    return isinstance(value, dict) and "passage" in value and isinstance(value.get("qa_pairs"), list)


def _of(*keys: str) -> Callable[[dict], list]:
    """Return a function that returns a row's values of these keys."""
    return lambda row: [row[key] for key in keys]


def _turns_of(key: str) -> Callable[[dict], list]:
    """Return a function that returns a row's value of a key, or its items if it is a list."""
    return lambda row: row[key] if isinstance(row[key], list) else [row[key]]


def _within(request: str) -> Callable[[dict, list[str]], list[str]]:
    """Return a function that puts a row's words into a request."""
    return lambda row, words: [request.format(*words)]


def _translate(row: dict, words: list[str]) -> list[str]:
    """Return the request for a translation into English if the row has it, else into its second language."""
    codes = [code for code, text in row["translation"].items() if text is not None]
    source = next(code for code in codes if code != "en" or len(codes) == 1)
    target = "en" if "en" in codes else next(code for code in codes if code != source)
    names = {"source": LANGUAGES.get(source, source), "target": LANGUAGES.get(target, target)}
    return [TRANSLATION_REQUEST.format(**names, text=row["translation"][source].strip())]


def _choose(row: dict, words: list[str]) -> list[str]:
    if not isinstance(row["choices"], list):
        return []
    choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip(ascii_uppercase, row["choices"]))
    subject = str(row.get("subject") or "general knowledge").replace("_", " ")
    return [MMLU_REQUEST.format(subject=subject, question=words[0].strip(), choices=choices)]


def _program(row: dict, words: list[str]) -> list[str]:
    if not isinstance(row["test_list"], list):
        return []
    return [MBPP_REQUEST.format(task=words[0], tests="\n".join(map(str, row["test_list"])))]


def _question(row: dict) -> list:
    question = row["question"]
    return [question["text"] if isinstance(question, dict) else question]  # the full Natural Questions


def _foreign(row: dict) -> list:
    return [text for code, text in row["translation"].items() if code != "en" and text is not None]


FORMS = [
    Form({"turns"}, _turns_of("turns")),  # MT-bench, and EAGLE's and Spec-Bench's files in its form
    Form({"translation"}, _foreign, _translate),  # WMT14
    Form({"article"}, lambda row: [row["article"].strip()], _within(SUMMARY_REQUEST)),  # CNN/Daily Mail
    Form({"passage", "question"}, _of("passage", "question"), _within(DROP_REQUEST)),  # DROP on the Hub
    Form({"context", "completion"}, _of("context")),  # DROP in simple-evals
    Form({"question", "choices"}, _question, _choose),  # MMLU
    Form({"text", "test_list"}, _of("text"), _program),  # MBPP
    Form({"prompt", "test_list"}, _of("prompt"), _program),  # its sanitized version
    Form({"question"}, _question),  # GSM8K, TriviaQA, Natural Questions
    Form({"question_text"}, _of("question_text")),  # Natural Questions, its authors' files
    Form(  # HumanEval
        {"prompt", "entry_point"},
        lambda row: [row["prompt"].lstrip("\n")],
        _within(CODE_REQUEST + "{0}"),
    ),
    # Blocksworld, whose PDDL no training text may have either
    Form({"prompt", "pddl"}, _of("prompt", "pddl"), lambda row, words: words[:1]),
    Form({"prompt"}, _turns_of("prompt")),  # one prompt or a list of turns (MT-bench by HuggingFaceH4)
]
