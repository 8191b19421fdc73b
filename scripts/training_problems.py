"""Write problems for trees of thoughts that a drafter may be trained on: none of them is one that trees are
evaluated or tuned on.

python scripts/training_problems.py --gsm8k train.jsonl.gz --oanc oanc_written_2.zip --out runs/problems
drafttrain reason recipes/reasoning/gsm8k.yaml --drafter null --tree null \
    --task.path runs/problems/gsm8k.jsonl --task.at_once 32 --scheduler.sequences 32 --out runs/thoughts/gsm8k

GSM8K's are those of its training split without the stored tuning, validation and held-out ones; those of
creative writing ask for four sentences of the Open American National Corpus; Blocksworld's are drawn at
random, their shortest plan has six actions, and none is a stored one with other names. The same files give
the same bytes; --skip 1000 draws others than a run without it. `corpus.sources` reads the folder of traces.
"""

import argparse
import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from drafttrain.data.overlap import EvaluationPrompts
from drafttrain.data.readers import read_conversations
from drafttrain.data.streams import open_streams, read_values
from drafttrain.reasoning.tasks.blocks import (
    HAND_EMPTY,
    Action,
    Blocks,
    Fact,
    conditions,
    describe,
    effects,
    read_pddl,
)
from drafttrain.utils.errors import UserError
from drafttrain.utils.writing import whole_file

Row = dict[str, object]

TUNED_ON = ["data/tuning_prompts.jsonl", "data/validation_prompts.jsonl", "data/heldout_prompts.jsonl"]
STORED_BLOCKS = "data/eval/blocksworld_step_6.jsonl.gz"
SUMMARIES = "data/eval/summarization.jsonl"  # its documents stay out
ENDS = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
SENTENCE = re.compile(r"[A-Z][a-z]*(?:[ ,']+[A-Za-z]?[a-z]+)+[.!?]")  # without figures and signs
SHORTEST, LONGEST = 6, 18  # words of a sentence
SENTENCES = 4
ACTIONS = 6  # of a shortest plan


def gsm8k(path: Path, seed: int) -> Iterator[Row]:
    """Yield problems of GSM8K's training split in random order."""
    excluded = EvaluationPrompts.read(TUNED_ON)
    rows = [value for stream in open_streams(path) for _, value in read_values(stream)]
    if not all(isinstance(row, dict) and {"question", "answer"} <= row.keys() for row in rows):
        raise UserError(f"{path}: rows must have question and answer; name GSM8K's train.jsonl")
    kept = [
        {"id": f"gsm8k-train-{n}", "question": row["question"], "answer": row["answer"]}
        for n, row in enumerate(rows)
        if not excluded.overlap(row["question"])
    ]
    random.Random(seed).shuffle(kept)
    yield from kept


def writing(path: Path, seed: int) -> Iterator[Row]:
    """Yield requests for texts whose paragraphs end in sentences of a corpus, each sentence once."""
    excluded = tuple(json.loads(line)["id"] for line in Path(SUMMARIES).read_text().splitlines())
    found = set()
    for document in read_conversations(path, "oanc"):
        if document.source.split(".txt")[0].endswith(excluded):
            continue
        for sentence in ENDS.split(document.messages[0].content.replace("\n", " ")):
            if SHORTEST <= len(sentence.split()) <= LONGEST and SENTENCE.fullmatch(sentence):
                found.add(sentence)
    sentences = sorted(found)
    random.Random(seed).shuffle(sentences)
    for n in range(len(sentences) // SENTENCES):
        own = sentences[n * SENTENCES : (n + 1) * SENTENCES]
        yield {"id": f"writing-{n}", "prompt": " ".join(own), "end_sentences": own}


def blocksworld(seed: int) -> Iterator[Row]:
    """Yield random problems of three to five blocks, without end."""
    rows = [value for stream in open_streams(STORED_BLOCKS) for _, value in read_values(stream)]
    stored = {without_names(read_pddl(row["pddl"], STORED_BLOCKS)) for row in rows}
    draw = random.Random(seed)
    drawn: set[Blocks] = set()
    while True:
        names = "abcde"[: draw.choice((3, 4, 4, 5))]
        goal = [fact for fact in placed(names, draw) if fact[0] == "on"]
        blocks = Blocks(tuple(names), frozenset(placed(names, draw)), frozenset(goal))
        if goal and blocks not in drawn and len(plan := shortest_plan(blocks, ACTIONS)) == ACTIONS:
            if without_names(blocks) not in stored:
                id = f"blocksworld-{len(drawn)}"
                drawn.add(blocks)
                actions = "".join(f"({' '.join(action)})\n" for action in plan)
                yield {"id": id, "prompt": describe(blocks), "pddl": as_pddl(blocks), "plan": actions}


def placed(names: str, draw: random.Random) -> list[Fact]:
    """Return the facts of blocks in random piles."""
    order = draw.sample(names, len(names))
    facts: list[Fact] = [HAND_EMPTY]
    below = None
    for block in order:
        if below is None or draw.random() < 0.5:
            facts += [("ontable", block)] + ([("clear", below)] if below else [])
        else:
            facts.append(("on", block, below))
        below = block
    return [*facts, ("clear", below)]


def shortest_plan(blocks: Blocks, limit: int) -> list[Action]:
    """Return a plan of the fewest actions; [] where none of at most `limit` reaches the goal."""
    actions = [(name, block) for name in ("pick-up", "put-down") for block in blocks.names]
    actions += [
        (name, *pair) for name in ("unstack", "stack") for pair in itertools.permutations(blocks.names, 2)
    ]
    layer: dict[frozenset[Fact], list[Action]] = {blocks.start: []}
    seen = set(layer)
    for _ in range(limit + 1):
        for state, plan in layer.items():
            if blocks.goal <= state:
                return plan
        layer = {
            after: [*plan, action]
            for state, plan in layer.items()
            for action in actions
            if conditions(action) <= state
            and (after := state - conditions(action) | effects(action)) not in seen
        }
        seen |= layer.keys()
    return []


def without_names(blocks: Blocks) -> tuple[tuple[Fact, ...], tuple[Fact, ...]]:
    """Return the facts of start and goal under the names that put them first, the same for all problems that
    differ in names alone."""
    forms = []
    for names in itertools.permutations("abcdefghij"[: len(blocks.names)]):
        named = dict(zip(blocks.names, names))
        forms.append(
            tuple(
                tuple(sorted((fact[0], *(named[block] for block in fact[1:])) for fact in facts))
                for facts in (blocks.start, blocks.goal)
            )
        )
    return min(forms)


def as_pddl(blocks: Blocks) -> str:
    """Return a problem as PDDL."""
    start, goal = (
        " ".join(f"({' '.join(fact)})" for fact in sorted(facts)) for facts in (blocks.start, blocks.goal)
    )
    names = " ".join(blocks.names)
    return (
        f"(define (problem drawn) (:domain blocksworld-4ops) (:objects {names})\n"
        f"(:init {start})\n(:goal (and {goal})))\n"
    )


def write(rows: Iterator[Row], skip: int, number: int, path: Path) -> None:
    """Write a file of JSON lines, whole or not at all.

    Raises:
        UserError: there are fewer rows.
    """
    chosen = list(itertools.islice(rows, skip, skip + number))
    if len(chosen) < number:
        raise UserError(
            f"{path}: number must be <= {len(chosen)} after {skip} problems, got {number}; lower it"
        )
    with whole_file(path) as file:
        file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen).encode())
    print(f"{path}: {number} problems")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gsm8k", type=Path, required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--oanc", type=Path, required=True, help="archive of the corpus")
    parser.add_argument("--number", type=int, default=1000, help="problems of each task")
    parser.add_argument("--skip", type=int, default=0, help="leave out as many before, of an earlier run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    args = parser.parse_args(argv)
    if args.number < 1 or args.skip < 0:
        parser.error(f"--number and --skip: must be >= 1 and >= 0, got {args.number} and {args.skip}")
    args.out.mkdir(parents=True, exist_ok=True)
    found = {
        "gsm8k": gsm8k(args.gsm8k, args.seed),
        "writing": writing(args.oanc, args.seed),
        "blocksworld": blocksworld(args.seed),
    }
    try:
        for task, rows in found.items():
            write(rows, args.skip, args.number, args.out / f"{task}.jsonl")
    except UserError as error:
        parser.exit(2, f"training_problems: {error}\n")


if __name__ == "__main__":
    main()
