"""Measure decoding methods against each other.

Every chat turn is decoded by all methods, one after the other, in an order that rotates from turn to turn, so
that a machine that slows down or warms up affects all of them. Benchmarks and evaluations differ in what they
pass to `measure_tasks` and in how they print its result.
"""

import itertools
import json
import os
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from drafttrain.data.prompts import Task
from drafttrain.evaluation.memory import peak_bytes, reset_peak
from drafttrain.evaluation.metrics import Measurement, MethodRun
from drafttrain.inference.decode import decode_all
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.proposer import NoProposer, Proposer
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.target_lm.stock import load_stock_model
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import require_file, usable
from drafttrain.utils.machine import OtherLoad
from drafttrain.utils.progress import counted
from drafttrain.utils.writing import whole_file

WARM_UP_TOKENS = 16
Method = Callable[[list[int], int], MethodRun]  # prompt ids, max_new_tokens


def drafting(
    target: FrozenTarget,
    proposer: Proposer,
    sampling: SamplingParams | None = None,
    taps: Sequence[int] | None = None,
) -> Method:
    """Return the method that runs our decode loop with a proposer, batch 1.

    Args:
        sampling: None is greedy; see `seeded` for the draws.
        taps: blocks that the proposer reads, where several proposers share the target. None leaves the
            target's taps alone.
    """

    def run(prompt_ids: list[int], max_new_tokens: int) -> MethodRun:
        if taps is not None:
            target.tap(taps)
        draws = [SamplingParams() if sampling is None else seeded(sampling, prompt_ids)]
        started = time.perf_counter()
        outputs, stats = decode_all(target, proposer, [prompt_ids], max_new_tokens, sampling=draws)
        return MethodRun(time.perf_counter() - started, outputs[0], stats)

    return run


def autoregressive(
    target: FrozenTarget, sampling: SamplingParams | None = None, taps: Sequence[int] | None = None
) -> Method:
    """Return the method that runs the same loop without drafts, which speedup is measured against."""
    return drafting(target, NoProposer(), sampling, taps)


def transformers_generate(
    target: FrozenTarget,
    model: PreTrainedModel | None = None,
    sampling: SamplingParams | None = None,
    **options: Any,
) -> Method:
    """Return the method that runs transformers' `generate` on the same model, with its default cache.

    Args:
        model: the target's, loaded by `load_stock_model`. None loads it.
        sampling: None is greedy. Transformers draws its own random numbers, with a seed from `seeded`.
        options: of `generate`, such as `assistant_model` or `prompt_lookup_num_tokens`.
    """
    model = load_stock_model(target) if model is None else model

    def run(prompt_ids: list[int], max_new_tokens: int) -> MethodRun:
        params = None if sampling is None else seeded(sampling, prompt_ids)
        started = time.perf_counter()
        [new] = generate_batch(model, target, [prompt_ids], max_new_tokens, params, **options)
        return MethodRun(time.perf_counter() - started, new)

    return run


def seeded(sampling: SamplingParams, prompt_ids: Sequence[int]) -> SamplingParams:
    """Return the same parameters with a seed for this prompt, the same for all methods and in all repeats."""
    text = ",".join(map(str, (sampling.seed, *prompt_ids)))
    return replace(sampling, seed=zlib.crc32(text.encode()))


def generate_batch(
    model: PreTrainedModel,
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingParams | None = None,
    **options: Any,
) -> list[list[int]]:
    """Run `generate` over prompts padded on the left; a stop token ends a row and is part of it.

    Args:
        target: whose stop tokens count.
        sampling: None is greedy. Its seed becomes torch's.
        options: of `generate`; some are for one prompt only.
    """
    stop = sorted(target.eos_token_ids)
    pad, longest = stop[0] if stop else 0, max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts])  # [B, n]
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])  # [B, n]
    sampled = sampling is not None and sampling.temperature > 0
    if sampled:
        torch.manual_seed(sampling.seed)
    out = model.generate(
        ids.to(target.device),
        attention_mask=mask.to(target.device),
        max_new_tokens=max_new_tokens,
        eos_token_id=stop or None,
        pad_token_id=pad,
        # all of them, because checkpoints bring defaults of their own (Qwen: a repetition penalty)
        use_cache=True,
        return_dict_in_generate=False,
        do_sample=sampled,
        num_beams=1,
        repetition_penalty=1.0,
        temperature=sampling.temperature if sampled else None,
        top_p=sampling.top_p if sampled else None,
        top_k=(sampling.top_k or 0) if sampled else None,
        **options,
    )
    rows = out[:, longest:].tolist()
    ends = (next((i for i, token in enumerate(row) if token in stop), len(row)) for row in rows)
    return [row[: end + 1] for row, end in zip(rows, ends)]


class MeasurementLog:
    """Measurements in a JSONL file, each written as soon as it is made.

    Args:
        path: the file. Its first line identifies what was measured; a file about something else is replaced.
        key: fingerprint of everything that the measurements depend on, apart from prompt and methods.
        replace: False raises an error for a file about something else.

    Raises:
        UserError: that, or a damaged or repeated line.
    """

    def __init__(self, path: str | os.PathLike, key: str, replace: bool = True):
        self.path, self.key = Path(path), key
        self._known: dict[tuple, Measurement] = {}
        require_file(self.path)
        # the last element is empty, or a line that a kill cut off
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        head = json.dumps({"measured": key}).encode()
        if len(lines) > 1 and lines[0] != head and not replace:
            raise UserError(
                f"{self.path}: holds measurements of other things (methods, prompts, settings, machine, or "
                "costs measured again); name another folder, or delete it"
            )
        if lines[:1] != [head]:
            lines = [head]
        for number, line in enumerate(lines[1:], 2):
            with usable(f"{self.path}: line {number}", "remove it, and it is measured again"):
                measurement = Measurement.from_json(json.loads(line))
            if measurement.key in self._known:
                raise UserError(
                    f"{self.path}: line {number}: must not repeat an earlier line, got prompt "
                    f"{measurement.prompt} again; two processes have written it, delete it and measure again"
                )
            self._known[measurement.key] = measurement
        with whole_file(self.path) as file:
            file.writelines(line + b"\n" for line in lines)

    def find(
        self,
        task: str,
        prompt: str,
        turn: int,
        repeat: int,
        methods: Sequence[str],
        temperature: float = 0.0,
    ) -> Measurement | None:
        """Return an earlier measurement of exactly these methods; None if there is none."""
        return self._known.get((task, prompt, turn, repeat, frozenset(methods), temperature))

    def add(self, measurement: Measurement) -> None:
        """Append a measurement to the file."""
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(measurement.to_json()) + "\n")


def check_lengths(target: FrozenTarget, tasks: Sequence[Task], max_new_tokens: int) -> None:
    """Require all prompts to fit the target, before anything is measured; the answers before a later chat
    turn are unknown, and a dot takes the place of each.

    Raises:
        UserError: one does not; names it.
    """
    for task in tasks:
        for prompt in task.prompts:
            earlier = min(task.turns, len(prompt.turns)) - 1
            ids = prompt.token_ids(target.tokenizer, ["."] * earlier)  # templates refuse empty ones
            target.check_length(ids, max_new_tokens, f"{task.name}: prompt {prompt.id}")


def measure_tasks(
    target: FrozenTarget,
    methods: dict[str, Method],
    tasks: Sequence[Task],
    log: MeasurementLog,
    title: str = "measuring",
    **options: Any,
) -> list[Measurement]:
    """Measure all methods on all tasks and show the progress.

    Args:
        title: of the progress bar.
        options: of `measure`.
    """
    turns = options.get("repeats", 1) * sum(task.n_turns for task in tasks)
    with counted(title, turns, "turns") as step:
        return [
            measurement
            for task in tasks
            for measurement in measure(target, methods, task, log, on_turn=step, **options)
        ]


def measure(
    target: FrozenTarget,
    methods: dict[str, Method],
    task: Task,
    log: MeasurementLog,
    max_new_tokens: int = 96,
    repeats: int = 1,
    on_turn: Callable[[], None] = lambda: None,
    temperature: float = 0.0,
    too_long: set[tuple[str, str, int]] | None = None,
) -> list[Measurement]:
    """Decode every chat turn of a task by every method, interleaved; what the log holds is not repeated.

    The answer that later turns of a chat refer to is the first method's in the first repeat, so that all
    methods decode the same prompts in all repeats, even where a machine does not compute the same twice.

    Args:
        methods: by name; the order rotates from turn to turn.
        on_turn: called after each chat turn, whether it was measured now, found in the log or left out.
        temperature: that the methods sample with, for the record.
        too_long: gets task, prompt and turn of what is left out: a turn that does not fit the target, and
            those after it in its chat. None: the first such turn is an error.

    Raises:
        UserError: a prompt does not fit the target; names it.
    """
    tokenizer, names = target.tokenizer, list(methods)
    timer, done = _Timer(target, methods, max_new_tokens), []
    answers: dict[str, list[str]] = {}  # by prompt
    for repeat, (number, prompt) in itertools.product(range(repeats), enumerate(task.prompts)):
        given, turns = answers.setdefault(prompt.id, []), min(task.turns, len(prompt.turns))
        for turn in range(turns):
            measurement = log.find(task.name, prompt.id, turn, repeat, names, temperature)
            if measurement is None:
                ids = prompt.token_ids(tokenizer, given[:turn])
                if too_long is not None and not target.fits(ids, max_new_tokens):
                    for left_out in range(turn, turns):
                        too_long.add((task.name, prompt.id, left_out))
                        on_turn()
                    break
                target.check_length(ids, max_new_tokens, f"{task.name}: prompt {prompt.id}")
                runs, load, harness = timer.run(ids, first=number + turn + repeat)
                place = (task.name, prompt.id, turn, repeat, len(ids))
                measurement = Measurement(*place, runs, load, temperature, harness)
                log.add(measurement)
            else:
                timer.lap = time.perf_counter()
            done.append(measurement)
            if repeat == 0:
                answer = measurement.runs[names[0]].token_ids
                given.append(tokenizer.decode(answer, skip_special_tokens=True))
            on_turn()
    return done


class _Timer:
    """Runs all methods on one turn after the other, and times the overhead of measuring separately.

    Attributes:
        lap: time at which the previous turn was done.
    """

    def __init__(self, target: FrozenTarget, methods: dict[str, Method], max_new_tokens: int):
        self.target, self.methods, self.max_new_tokens = target, methods, max_new_tokens
        self.is_warm, self.lap = False, time.perf_counter()

    def run(self, prompt_ids: list[int], first: int) -> tuple[dict[str, MethodRun], float | None, float]:
        """Run all methods on a prompt, beginning with number `first` and wrapping around.

        Returns:
            the runs; cores that other processes took; seconds since the previous turn outside the runs and
            the warm-up.
        """
        if not self.is_warm:
            started = time.perf_counter()
            for method in self.methods.values():
                method(prompt_ids, min(WARM_UP_TOKENS, self.max_new_tokens))
            self.is_warm = True
            self.lap += time.perf_counter() - started
        load, names, runs = OtherLoad(), list(self.methods), {}
        start = first % len(names)
        for name in names[start:] + names[:start]:
            is_new = reset_peak(self.target.device)
            runs[name] = self.methods[name](prompt_ids, self.max_new_tokens)
            runs[name].peak_bytes = peak_bytes(self.target.device) if is_new else None
        taken, before, self.lap = load.lap(), self.lap, time.perf_counter()
        return runs, taken, self.lap - before - sum(run.seconds for run in runs.values())
