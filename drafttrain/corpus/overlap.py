"""Evaluation prompts, to be kept out of training data.

Prompts are compared with case and punctuation folded, because copies in chats differ in quotes and line ends.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from drafttrain.corpus.streams import open_streams, read_json_values, read_jsonl, read_lines
from drafttrain.errors import UserError

_OPENING = 3  # words by which contained prompts are looked up
_MIN_WORDS = 10  # a shorter prompt ("Continue.") counts only if it is the whole turn


def fold(text: str) -> str:
    """Lower-case words and numbers, one space between them.

    >>> fold("Who's  “there”?")
    'who s there'
    """
    return " ".join(re.findall(r"[^\W_]+", text.casefold()))


class EvaluationPrompts:
    """A set of prompts that recognizes them, whole or inside a longer turn."""

    def __init__(self, prompts: Iterable[str]) -> None:
        """Args:
        prompts: as shown to the model, unfolded.
        """
        self._whole = {folded for prompt in prompts if (folded := fold(prompt))}
        self._by_opening: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for prompt in sorted(self._whole):
            words = prompt.split(" ")
            if len(words) >= _MIN_WORDS:
                self._by_opening[tuple(words[:_OPENING])].append(f" {prompt} ")

    def __len__(self) -> int:
        return len(self._whole)

    @classmethod
    def read(cls, paths: Iterable[str | Path]) -> "EvaluationPrompts":
        """Reads prompt files: JSON or JSON lines with `turns`, `question` or `prompt`, or plain lines.

        Raises:
            UserError: a file is unreadable, empty, or has a row without one of those keys.
        """
        prompts: list[str] = []
        for path in paths:
            before = len(prompts)
            for stream in open_streams(path):
                if stream.suffix in (".jsonl", ".ndjson", ".json"):
                    read = read_json_values if stream.suffix == ".json" else read_jsonl
                    for row, value in read(stream):
                        prompts += _prompts_of(value, f"{stream.source}:row {row}")
                elif stream.given or stream.suffix in (".txt", ".text"):
                    prompts += [line for _, line in read_lines(stream)]
            if len(prompts) == before:
                raise UserError(f"{path}: holds no prompts; expected .jsonl, .json or .txt files")
        return cls(prompts)

    def overlap(self, text: str) -> bool:
        """Whether a turn or its first paragraph is a prompt, or contains one of at least ten words.

        Alpaca's prompts end up in benchmarks without their input, which is the second paragraph here.
        """
        folded = fold(text)
        if folded in self._whole or fold(text.strip().split("\n\n", 1)[0]) in self._whole:
            return True
        words = folded.split(" ")
        openings = self._by_opening.keys() & set(zip(*(words[i:] for i in range(_OPENING)), strict=False))
        padded = f" {folded} "
        return any(prompt in padded for opening in openings for prompt in self._by_opening[opening])


def _prompts_of(value: object, source: str) -> list[str]:
    if isinstance(value, str):
        return [value]
    keys = ["turns", "question", "prompt"]
    if isinstance(value, dict) and "test_list" in value:  # MBPP
        keys.append("text")
    for key in keys:
        prompt = value.get(key) if isinstance(value, dict) else None
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and all(isinstance(turn, str) for turn in prompt):
            return prompt
    raise UserError(
        f"{source}: no text under turns, question or prompt; is this a file of evaluation prompts?"
    )
