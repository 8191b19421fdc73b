"""The prompts that PipeDec is measured with: ten of each of its paper's six tasks."""

import json
from collections.abc import Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from drafttrain.data.prompts import Prompt, read_prompts

FILES = {
    "humaneval": "data/eval/humaneval.jsonl.gz",
    "drop": "data/eval/drop.jsonl",
    "mmlu": "data/eval/mmlu.jsonl",
    "trivia": "data/eval/questions.jsonl",
    "gsm8k": "data/eval/gsm8k_test_80.jsonl",
}
BY_PATH = "wmt14"  # may not be redistributed: --prompts wmt14=FILE
PROMPTS = 10  # of each task
TUNING = "data/tuning_prompts.jsonl"


def read_tasks(more: Mapping[str, str], limit: int = PROMPTS) -> dict[str, list[Prompt]]:
    """Return the prompts of each task; those of WMT14 only where their file is given."""
    given = {BY_PATH: more[BY_PATH]} if BY_PATH in more else {}
    return {name: read_prompts(path, limit) for name, path in (FILES | given).items()}


def write_prompts(tasks: Mapping[str, list[Prompt]], path: Path) -> None:
    """Write first turns to one file, as `drafttrain pipeline` reads it; ids begin with the task."""
    rows = [
        {"id": f"{name}/{prompt.id}", "turns": prompt.turns[:1], "system": prompt.system}
        for name, prompts in tasks.items()
        for prompt in prompts
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read_written(path: Path, tokenizer: PreTrainedTokenizerBase) -> dict[tuple[str, str], list[int]]:
    """Return the token ids of prompts that `write_prompts` wrote, by task and prompt."""
    return {tuple(one.id.split("/", 1)): one.token_ids(tokenizer) for one in read_prompts(path)}


def sizes(tasks: Mapping[str, list[Prompt]]) -> dict[str, int]:
    """Return the number of prompts of each task."""
    return {name: len(prompts) for name, prompts in tasks.items()}
