"""Measures decoding methods against each other.

Every chat turn is decoded by all methods, one after the other, in an order that rotates from turn to turn, so
that a machine that slows down or warms up slows all of them.

Later methods (other trees, other drafters) are further entries of the `methods` given to `measure`.
"""

import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from drafttrain.errors import UserError
from drafttrain.evaluation.machine import OtherLoad
from drafttrain.evaluation.metrics import Measurement, MethodRun
from drafttrain.evaluation.prompts import Task
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer, Proposer
from drafttrain.target.frozen import FrozenTarget
from drafttrain.target.loading import load_stock_model

WARM_UP_TOKENS = 16
Method = Callable[[list[int], int], MethodRun]  # prompt ids, max_new_tokens


def drafting(target: FrozenTarget, proposer: Proposer) -> Method:
    """Our decode loop with any proposer, batch 1, greedy."""

    def run(prompt_ids: list[int], max_new_tokens: int) -> MethodRun:
        started = time.perf_counter()
        outputs, stats = decode_all(target, proposer, [prompt_ids], max_new_tokens)
        return MethodRun(time.perf_counter() - started, outputs[0], stats)

    return run


def autoregressive(target: FrozenTarget) -> Method:
    """The same loop without drafts: what speedup is measured against."""
    return drafting(target, NoProposer())


def transformers_generate(target: FrozenTarget, lookup: int | None = None) -> Method:
    """`generate` of the same model as transformers loads it, greedy, with its default cache.

    Args:
        lookup: tokens of its prompt lookup; None goes without.
    """
    model = load_stock_model(target)

    def run(prompt_ids: list[int], max_new_tokens: int) -> MethodRun:
        started = time.perf_counter()
        [new] = generate_batch(model, target, [prompt_ids], max_new_tokens, lookup)
        return MethodRun(time.perf_counter() - started, new)

    return run


def generate_batch(
    model: PreTrainedModel,
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    lookup: int | None = None,
) -> list[list[int]]:
    """Greedy `generate` over prompts padded on the left; a stop token ends a row and is part of it.

    Args:
        target: whose stop tokens count.
        lookup: tokens of prompt lookup, for one prompt; None goes without.
    """
    stop = sorted(target.eos_token_ids)
    pad, longest = stop[0] if stop else 0, max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])  # [B, n]
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])  # [B, n]
    out = model.generate(
        ids.to(target.device),
        attention_mask=mask.to(target.device),
        max_new_tokens=max_new_tokens,
        eos_token_id=stop or None,
        pad_token_id=pad,
        # said in full, because checkpoints bring defaults of their own (Qwen: a repetition penalty)
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        temperature=None,
        top_p=None,
        top_k=None,
        prompt_lookup_num_tokens=lookup,
    )
    rows = out[:, longest:].tolist()
    ends = (next((i for i, token in enumerate(row) if token in stop), len(row)) for row in rows)
    return [row[: end + 1] for row, end in zip(rows, ends)]


class MeasurementLog:
    """Measurements in a JSONL file, each written as soon as it is made.

    Args:
        path: the file. Its first line says what was measured; a file about something else is replaced.
        key: fingerprint of everything that the measurements depend on, apart from prompt and methods.
    """

    def __init__(self, path: str | os.PathLike, key: str):
        self.path, self.key = Path(path), key
        self._found: dict[tuple, dict[str, Any]] = {}
        # the last element is empty, or a line that a kill cut off
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        head = json.dumps({"measured": key}).encode()
        kept = lines if lines[:1] == [head] else [head]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        temporary.write_bytes(b"".join(line + b"\n" for line in kept))
        os.replace(temporary, self.path)
        for value in map(json.loads, kept[1:]):
            self._found[self._name(value)] = value

    @staticmethod
    def _name(value: dict[str, Any]) -> tuple:
        return value["task"], value["prompt"], value["turn"], value["repeat"], frozenset(value["runs"])

    def find(
        self, task: str, prompt: str, turn: int, repeat: int, methods: Sequence[str]
    ) -> Measurement | None:
        """An earlier measurement of just these methods."""
        value = self._found.get((task, prompt, turn, repeat, frozenset(methods)))
        return None if value is None else Measurement.from_json(value)

    def add(self, measurement: Measurement) -> None:
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(measurement.to_json()) + "\n")


def measure(
    target: FrozenTarget,
    methods: dict[str, Method],
    task: Task,
    log: MeasurementLog,
    max_new_tokens: int = 96,
    repeats: int = 1,
    on_turn: Callable[[], None] = lambda: None,
) -> list[Measurement]:
    """Decodes every chat turn of a task by every method, interleaved; what the log holds is not repeated.

    The answer that later turns of a chat refer to is the first method's.

    Args:
        methods: by name; the order rotates from turn to turn.
        on_turn: called after each chat turn, measured or found in the log.

    Raises:
        UserError: a prompt does not fit the target; names it.
    """
    tokenizer, names = target.tokenizer, list(methods)
    done, is_warm = [], False
    for repeat, (number, prompt) in itertools.product(range(repeats), enumerate(task.prompts)):
        answers: list[str] = []
        for turn in range(min(task.turns, len(prompt.turns))):
            found = log.find(task.name, prompt.id, turn, repeat, names)
            if found is None:
                ids = prompt.token_ids(tokenizer, answers)
                check_length(target, ids, max_new_tokens, f"{task.name}: prompt {prompt.id}")
                if not is_warm:
                    _run_all(methods, ids, min(WARM_UP_TOKENS, max_new_tokens))
                    is_warm = True
                load = OtherLoad()
                runs = _run_all(methods, ids, max_new_tokens, first=number + turn + repeat)
                found = Measurement(task.name, prompt.id, turn, repeat, len(ids), runs, load.lap())
                log.add(found)
            done.append(found)
            answers.append(tokenizer.decode(found.runs[names[0]].token_ids, skip_special_tokens=True))
            on_turn()
    return done


def _run_all(
    methods: dict[str, Method], prompt_ids: list[int], max_new_tokens: int, first: int = 0
) -> dict[str, MethodRun]:
    """Runs the methods in their order, beginning with number `first` and going round."""
    names = list(methods)
    start = first % len(names)
    return {name: methods[name](prompt_ids, max_new_tokens) for name in names[start:] + names[:start]}


def check_length(target: FrozenTarget, prompt_ids: list[int], max_new_tokens: int, which: str) -> None:
    """Raises:
    UserError: prompt and new tokens exceed the target's positions; names the prompt.
    """
    limit = getattr(target.config, "max_position_embeddings", None)
    if limit and len(prompt_ids) + max_new_tokens > limit:
        raise UserError(
            f"{which} has {len(prompt_ids)} tokens, which with {max_new_tokens} new ones exceed the {limit} "
            f"positions of {target.name}; remove it or lower max_new_tokens"
        )
