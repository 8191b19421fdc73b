"""Write prompts whose licences allow it, for the target to answer: the questions of published files, and
requests about passages of the Open American National Corpus.

python scripts/training_prompts.py --gsm8k train.jsonl --gpteacher codegen-instruct.json --mbpp mbpp.jsonl \
    --oasst vicuna_sample.json --oanc oanc_written_2.zip --out data/train/prompts.jsonl.gz

Evaluation files stay out: MBPP's test tasks are skipped here, and passages from documents that an evaluation
passage was taken from; a recipe's `corpus.exclude` does the rest. The same files give the same bytes.
"""

import argparse
import gzip
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from drafttrain.data.readers import read_conversations
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import usable
from drafttrain.utils.writing import whole_file

Row = dict[str, object]

REQUESTS = (  # our own words, about a passage
    "Summarize the following passage.",
    "What are the main points of this text? Answer with a short list.",
    "Explain this passage in simple words.",
    "Write a title for this text and say in two sentences what it is about.",
    "Rewrite this passage so that a child of ten would understand it.",
    "Write three questions that this text answers, with their answers.",
    "Which facts does this text give? List them one by one.",
    "Continue this text with one more paragraph in the same style.",
    "What is the author's opinion here, and how can you tell?",
    "Rewrite this text in half as many words.",
    "List the names, places and dates in this passage.",
    "Give one argument for and one against what this passage says.",
)
SHORTEST, LONGEST = 60, 180  # words of a passage
MBPP_TEST = range(11, 511)  # its test split


def exchanges(path: Path, name: str) -> Iterator[Row]:
    """Yield the questions of a file that the package reads (GSM8K, GPTeacher)."""
    for number, conversation in enumerate(read_conversations(path)):
        yield row(f"{name}-{number}", conversation.messages[0].content)


def oasst_prompts(path: Path) -> Iterator[Row]:
    """Yield the prompts of a sampling report of Open-Assistant/oasst-model-eval."""
    for number, entry in enumerate(json.loads(_read(path))["prompts"]):
        yield row(f"oasst-{number}", entry["prompt"])


def mbpp_tasks(path: Path) -> Iterator[Row]:
    """Yield MBPP's tasks outside its test split, each with its first test."""
    for line in _read(path).splitlines():
        task = json.loads(line)
        if task["task_id"] not in MBPP_TEST:
            prompt = f"{task['text']} Your code should pass this test:\n\n{task['test_list'][0]}"
            yield row(f"mbpp-{task['task_id']}", prompt)


def passages(path: Path, number: int, excluded: set[str], seed: int) -> Iterator[Row]:
    """Yield requests about paragraphs of a corpus, as evenly as possible over its folders.

    Args:
        number: of requests.
        excluded: documents to leave out, by the end of their name without suffix.
        seed: of the choice.
    """
    by_part = defaultdict(list)
    for document in read_conversations(path, "oanc"):
        name = document.source.split(".txt")[0]
        if any(name.endswith(other) for other in excluded):
            continue
        for index, paragraph in enumerate(document.messages[0].content.split("\n\n")):
            if SHORTEST <= len(paragraph.split()) <= LONGEST and paragraph[0].isupper():
                by_part[Path(name).parent].append((f"oanc-{Path(name).name}-{index}", paragraph))
    draw = random.Random(seed)
    for part in by_part.values():
        draw.shuffle(part)
    taken = 0
    while taken < number and any(by_part.values()):
        for part in by_part.values():
            if part and taken < number:
                id, paragraph = part.pop()
                yield row(id, f"{REQUESTS[draw.randrange(len(REQUESTS))]}\n\n{paragraph}")
                taken += 1


def row(id: str, prompt: str) -> Row:
    """Return a ShareGPT row without an answer."""
    return {"id": id, "conversations": [{"from": "human", "value": prompt.strip()}]}


def _read(path: Path) -> str:
    raw = path.read_bytes()
    return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gsm8k", type=Path, help="its train.jsonl")
    parser.add_argument("--gpteacher", type=Path, nargs="*", default=[], help="its .json files")
    parser.add_argument("--mbpp", type=Path, help="its mbpp.jsonl")
    parser.add_argument("--oasst", type=Path, help="a sampling report with its prompts")
    parser.add_argument("--oanc", type=Path, help="zip or folder of the corpus")
    parser.add_argument("--passages", type=int, default=6000, help="requests about passages (default: 6000)")
    parser.add_argument("--evaluation", type=Path, default=Path("data/eval/summarization.jsonl"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, gzipped")
    args = parser.parse_args(argv)
    try:
        rows = collect(args)
        text = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in rows)
        with whole_file(args.out) as file:
            file.write(gzip.compress(text.encode(), 9, mtime=0))
    except UserError as error:
        parser.exit(2, f"training_prompts: {error}\n")
    print(f"{args.out}: {len(rows)} prompts")


def collect(args: argparse.Namespace) -> list[Row]:
    """Return the prompts of all files that are named.

    Raises:
        UserError: a file is unreadable, or not of its kind.
    """
    rows: list[Row] = []
    if args.gsm8k:
        rows += exchanges(args.gsm8k, "gsm8k-train")
    for path in args.gpteacher:
        rows += exchanges(path, f"gpteacher-{'codegen' if 'codegen' in path.name else 'roleplay'}")
    if args.mbpp:
        with usable(args.mbpp, "name MBPP's mbpp.jsonl"):
            rows += mbpp_tasks(args.mbpp)
    if args.oasst:
        with usable(args.oasst, "name a sampling report with its prompts"):
            rows += oasst_prompts(args.oasst)
    if args.oanc:
        with usable(args.evaluation, "name data/eval/summarization.jsonl"):
            used = {json.loads(line)["id"] for line in args.evaluation.read_text().splitlines()}
        rows += passages(args.oanc, args.passages, used, args.seed)
    return rows


if __name__ == "__main__":
    main()
