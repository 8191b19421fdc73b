"""What the user says in a row of a benchmark's file. What a row is shows in its keys:

    turns                       MT-bench, and the files that EAGLE and Spec-Bench made in its form
    translation                 WMT14, by language
    article (and highlights)    CNN/Daily Mail
    passage and question        DROP, as on the Hub
    context and completion      DROP, as simple-evals has it
    question and choices        MMLU
    text or prompt, test_list   MBPP
    question                    GSM8K, Natural Questions, TriviaQA
    question_text               Natural Questions, as their authors publish them
    prompt and entry_point      HumanEval
    prompt                      one prompt, or a list of turns (MT-bench, as HuggingFaceH4 has it)
    a chat or instruction       any row that the corpus reader knows (Alpaca): what the user says in it

Only the user's words are read, never a reference answer.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from drafttrain.data.rows import is_exchange, row_to_conversation, well_formed
from drafttrain.utils.errors import UserError

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


def flatten(value: Any) -> Iterator[Any]:
    """The rows in one value of a JSON file: itself, or what DROP's and TriviaQA's own files nest in one."""
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
    """The user's turns, and the system prompt if the row brings one.

    Args:
        source: file and row, for messages.

    Raises:
        UserError: there is no prompt in it.
    """
    form, _ = _form_of(row)
    system, turns = None, []
    try:
        if form is None:
            system, turns = _chat(row, source)
        else:
            turns = form(row)
    except (AttributeError, KeyError, TypeError, StopIteration):
        pass  # the keys are a benchmark's, what they hold is not
    return [well_formed(turn) for turn in _texts(turns, source)], system


def prompt_words(row: dict[str, Any], source: str) -> list[str]:
    """The texts that make the row's prompt, without the words that are put around them here; none where
    they are empty.

    Raises:
        UserError: there is something else in place of a prompt.
    """
    form, words = _form_of(row)
    if form is None:
        return prompt_turns(row, source)[0]
    try:
        found = words(row)
    except (AttributeError, KeyError, TypeError, StopIteration):
        found = []  # refused below
    if found and all(isinstance(text, str) for text in found):
        return [text for text in found if text.strip()]
    return _texts([], source)


def is_known(row: dict[str, Any]) -> bool:
    """Whether a row has the keys of a benchmark or a chat, whatever they hold."""
    return _form_of(row)[0] is not None or is_exchange(row)


def group_of(row: dict[str, Any], turns: Sequence[str]) -> str | None:
    """The part of its benchmark that a row belongs to, by its key `category`; MT-bench is one part.

    Args:
        turns: the row's. Those of MT-bench are two; EAGLE's GSM8K has a category "math" too.
    """
    category = row.get("category")
    if not isinstance(category, str) or not category.strip():
        return None
    is_mt_bench = category in MT_BENCH_CATEGORIES and len(turns) > 1
    return MT_BENCH if is_mt_bench else category.strip()


def _texts(found: list, source: str) -> list[str]:
    if not found or not all(isinstance(text, str) and text.strip() for text in found):
        raise UserError(
            f"{source}: no prompt in it; give it one under turns, question or prompt, or remove the row"
        )
    return found


def _is_drop_passage(value: Any) -> bool:
    return isinstance(value, dict) and "passage" in value and isinstance(value.get("qa_pairs"), list)


def _listed(value: Any) -> list:
    return value if isinstance(value, list) else [value]


def _is_text(*values: Any) -> bool:
    return all(isinstance(value, str) and value.strip() for value in values)


def _translation(row: dict) -> list:
    """Into English where it is one of the two, else from the first into the second."""
    codes = [code for code, text in row["translation"].items() if text is not None]
    source = next(code for code in codes if code != "en" or len(codes) == 1)
    target = "en" if "en" in codes else next(code for code in codes if code != source)
    names = {"source": LANGUAGES.get(source, source), "target": LANGUAGES.get(target, target)}
    text = row["translation"][source]
    return [TRANSLATION_REQUEST.format(**names, text=text.strip())] if text.strip() else []


def _translated(row: dict) -> list:
    return [text for code, text in row["translation"].items() if code != "en"]


def _summary(row: dict) -> list:
    return [SUMMARY_REQUEST.format(text=row["article"].strip())] if row["article"].strip() else []


def _drop(row: dict) -> list:
    return [DROP_REQUEST.format_map(row)] if _is_text(row["passage"], row["question"]) else []


def _mmlu(row: dict) -> list:
    if not isinstance(row["choices"], list) or not _is_text(row["question"]):
        return []
    choices = "\n".join(f"{letter}. {choice}" for letter, choice in zip("ABCDEFGH", row["choices"]))
    subject = str(row.get("subject") or "general knowledge").replace("_", " ")
    return [MMLU_REQUEST.format(subject=subject, question=row["question"].strip(), choices=choices)]


def _mbpp(row: dict) -> list:
    (task,) = _mbpp_task(row)
    if not isinstance(row["test_list"], list) or not _is_text(task):
        return []
    return [MBPP_REQUEST.format(task=task, tests="\n".join(map(str, row["test_list"])))]


def _mbpp_task(row: dict) -> list:
    return [row["text"] if "text" in row else row["prompt"]]


def _question(row: dict) -> list:
    question = row["question"]
    return [question["text"] if isinstance(question, dict) else question]  # Natural Questions as a whole


def _chat(row: dict, source: str) -> tuple[str | None, list[str]]:
    if not is_exchange(row):
        return None, []
    asked = {key: value for key, value in row.items() if key != "label"}  # that is about the answer
    chat = row_to_conversation(asked, "auto", source, source, Counter(), Counter())
    messages = [m for m in chat.messages if m.content.strip()] if chat and not chat.is_text else []
    system = next((message.content for message in messages if message.role == "system"), None)
    return system, [message.content for message in messages if message.role == "user"]


def _form_of(row: dict) -> tuple[Callable[[dict], list], Callable[[dict], list]] | tuple[None, None]:
    return next(((turns, words) for keys, turns, words in FORMS if keys <= row.keys()), (None, None))


# Keys, what is asked, and the row's own words in it; the first whose keys a row has.
FORMS: list[tuple[set[str], Callable[[dict], list], Callable[[dict], list]]] = [
    ({"turns"}, lambda row: _listed(row["turns"]), lambda row: _listed(row["turns"])),
    ({"translation"}, _translation, _translated),
    ({"article"}, _summary, lambda row: [row["article"]]),
    ({"passage", "question"}, _drop, lambda row: [row["passage"], row["question"]]),
    ({"context", "completion"}, lambda row: [row["context"]], lambda row: [row["context"]]),
    ({"question", "choices"}, _mmlu, _question),
    ({"text", "test_list"}, _mbpp, _mbpp_task),
    ({"prompt", "test_list"}, _mbpp, _mbpp_task),
    ({"question"}, _question, _question),
    ({"question_text"}, lambda row: [row["question_text"]], lambda row: [row["question_text"]]),
    (
        {"prompt", "entry_point"},
        lambda row: [CODE_REQUEST + row["prompt"].lstrip("\n")],
        lambda row: [row["prompt"]],
    ),
    ({"prompt"}, lambda row: _listed(row["prompt"]), lambda row: _listed(row["prompt"])),
]
