"""EDD trained on answers of at most 128, 256 and 512 tokens: as many tokens of answers and as many steps.

    python -m studies.edd.answer_lengths

The target answers the questions of the training text at length. Texts of shorter answers have the same ones,
cut, to more questions. The drafters are measured on answers of 256 tokens.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from drafttrain.data.config import RegenerateConfig, Source
from drafttrain.regenerate.responses import RESPONSES, read_rows
from drafttrain.regenerate.stage import regenerate
from drafttrain.target_lm.loading import resolve_target
from drafttrain.utils.writing import write_text
from studies.arguments import start
from studies.edd.bench import DRAFTER, RATES, TRAINING, Bench, run_study, summarize
from studies.edd.on_policy import first_turns

LENGTHS = (128, 256, 512)
MEASURED = 256  # tokens of the answers that are drafted
ANSWERS = RegenerateConfig(max_turns=1, max_new_tokens=max(LENGTHS), max_prompt_tokens=320)


def answer_lengths(bench: Bench) -> dict[str, Any]:
    """Train EDD on texts of each length, at one rate, from one seed."""
    bench.new_tokens = MEASURED
    answers = list(read_rows(answered(bench)))
    budget = count(cut(answers, min(LENGTHS)))  # of the length that gives the fewest tokens
    rows, texts = {}, {}
    for length in LENGTHS:
        text = some(cut(answers, length), budget)
        path = bench.out / f"answers_{length}.jsonl"
        for row in text:
            for turn in row["conversations"]:
                if "token_ids" in turn:
                    turn["value"] = bench.target.tokenizer.decode(turn["token_ids"], skip_special_tokens=True)
        write_text(path, "".join(json.dumps(row) + "\n" for row in text))
        made_from = bench.states(f"answers_{length}", [Source(str(path))], [-4])
        training = replace(TRAINING, lr=RATES[2], seed=0)
        name = f"answers of {length} tokens"
        rows[name] = [bench.trained(f"edd-answers-{length}-seed0", DRAFTER, training, made_from)]
        texts[name] = {"answers": len(text), "tokens": count(text)}
    return {"rows": summarize(rows), "texts": texts}


def answered(bench: Bench) -> Path:
    """Let the target answer the questions of the training text at length; return where."""
    folder = bench.out / "long_answers"
    folder.mkdir(parents=True, exist_ok=True)
    asked = [
        {"id": prompt.id, "conversations": [{"from": "human", "value": prompt.turns[0]}]}
        for prompt in first_turns(bench)
    ]
    write_text(folder / "prompts.jsonl", "".join(json.dumps(row) + "\n" for row in asked))
    config = replace(ANSWERS, sources=[Source(str(folder / "prompts.jsonl"))])
    if not (folder / "answers" / RESPONSES).exists():
        regenerate(config, resolve_target(bench.model), folder / "answers", "bfloat16")
    return folder / "answers"


def cut(answers: Iterable[dict[str, Any]], length: int) -> list[dict[str, Any]]:
    """Return rows whose answers end after `length` tokens."""
    return [
        row
        | {
            "conversations": [
                turn | {"token_ids": turn["token_ids"][:length]} if "token_ids" in turn else dict(turn)
                for turn in row["conversations"]
            ]
        }
        for row in answers
    ]


def count(answers: Iterable[dict[str, Any]]) -> int:
    """Return the tokens of the answers."""
    return sum(len(turn.get("token_ids", ())) for row in answers for turn in row["conversations"])


def some(answers: Sequence[dict[str, Any]], tokens: int) -> list[dict[str, Any]]:
    """Return evenly spaced rows whose answers have about `tokens` tokens together."""
    share, seen, kept = tokens / max(count(answers), 1), 0, 0
    found = []
    for row in answers:
        size = count([row])
        seen += size
        if kept + size / 2 <= share * seen:
            found.append(row)
            kept += size
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study; return the exit status."""
    return run_study(answer_lengths, __doc__, argv)


if __name__ == "__main__":
    start(main)
