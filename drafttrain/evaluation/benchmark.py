"""`drafttrain benchmark`: any methods on any tasks with one target, interleaved.

Nothing is tuned here: what is compared is named on the command line, and prompts are only reported on.
`measurements.jsonl` is written turn by turn, and an interrupted benchmark continues there.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from drafttrain.data.config import HUB
from drafttrain.data.prompts import Task, read_prompts, spread
from drafttrain.evaluation.benchmark_report import print_benchmark
from drafttrain.evaluation.config import ALL, BenchmarkConfig, TaskSpec
from drafttrain.evaluation.evaluate import progress
from drafttrain.evaluation.measure import MeasurementLog, measure
from drafttrain.evaluation.memory import covered, peak_bytes
from drafttrain.evaluation.methods import Methods
from drafttrain.evaluation.metrics import Measurement, crowding, tabulate
from drafttrain.evaluation.stock import load_stock
from drafttrain.inference.sampling import SamplingParams
from drafttrain.kernels.machine import describe_machine
from drafttrain.target_lm.loading import load_for_decoding
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint, write_json
from drafttrain.utils.machine import check_quiet, dtype_name
from drafttrain.utils.provenance import git_commit, versions

FORMAT_VERSION = 1  # of benchmark.json
FIRST_BUCKET = 256  # tokens; the buckets of context lengths above it double


def benchmark(config: BenchmarkConfig, out: str | os.PathLike) -> dict[str, Any]:
    """Measure all methods on all tasks and print a table for each task and temperature.

    Args:
        out: folder to write to: `benchmark.json` (what is returned) and, as it goes, `measurements.jsonl`. A
            benchmark of the same things that was interrupted, or had fewer prompts, repeats or temperatures,
            is continued.

    Raises:
        UserError: settings, prompts or a bundle are unusable, the folder holds a benchmark of other things, a
            prompt is too long, or the machine is busy and `busy` says refuse.
    """
    out, console = Path(out), Console()
    config.check()
    read = {spec.name: read_task(spec, config.turns) for spec in config.tasks}
    tasks = [part for task in read.values() for part in limited(task, config.limit)]
    if warning := check_quiet(refuse=config.busy == "refuse"):
        console.print(f"[yellow]timings will be poor:[/] {warning}", highlight=False, soft_wrap=True)
    target = load_for_decoding(config.target, dtype=config.dtype, device=config.device)
    first = tasks[0].prompts[0].token_ids(target.tokenizer)
    stock = load_stock(target, config.dtype == "auto", first, out)
    methods = Methods(target, config.methods, stock)
    for warning in methods.warnings:
        console.print(warning, style="yellow", markup=False, highlight=False, soft_wrap=True)
    machine = describe_machine(target.device, target.dtype)
    contents = {name: fingerprint([asdict(p) for p in task.prompts]) for name, task in read.items()}
    dtype = dtype_name(target.dtype)
    depends = [target.fingerprint, dtype, config.max_new_tokens, config.seed, machine, versions()]
    key = fingerprint([*depends, stock.dtype, methods.identity, contents])
    log = MeasurementLog(out / "measurements.jsonl", key, replace=False)
    loading = peak_bytes(target.device)
    measured, too_long = _measure_all(config, methods, tasks, log)
    settings = ("limit", "turns", "temperatures", "repeats", "max_new_tokens", "seed", "skip_long")
    summary = {
        "format_version": FORMAT_VERSION,
        "measured": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "target": {"name": config.target, "dtype": dtype, "fingerprint": target.fingerprint},
        "settings": {name: getattr(config, name) for name in settings},
        "methods": methods.described,
        "tasks": _describe_tasks(config, tasks, contents, too_long),
        "machine": {**machine, "load": crowding(measured)},
        "versions": versions(),
        "commit": git_commit(),
        "crowding": crowding(measured),
        "harness": harness_share(measured),
        "peak_memory": {"bytes": _peak(loading, measured), "covers": covered(target.device)},
        "rows": make_rows(measured, list(methods.described)),
    }
    write_json(out / "benchmark.json", summary)
    print_benchmark(summary, console)
    return summary


def _measure_all(
    config: BenchmarkConfig, methods: Methods, tasks: Sequence[Task], log: MeasurementLog
) -> tuple[list[Measurement], set[tuple[str, str, int]]]:
    """Every measurement, and the chat turns left out because they are too long: task, prompt, turn."""
    measured: list[Measurement] = []
    too_long: set[tuple[str, str, int]] = set()
    with progress("measuring", tasks, config.repeats * len(config.temperatures)) as step:
        for temperature in config.temperatures:
            compared = methods.at(SamplingParams(temperature, seed=config.seed))
            for task in tasks:

                def leave_out(prompt: str, turn: int, name: str = task.name) -> None:
                    too_long.add((name, prompt, turn))
                    step()

                measured += measure(
                    methods.target,
                    compared,
                    task,
                    log,
                    config.max_new_tokens,
                    config.repeats,
                    on_turn=step,
                    temperature=temperature,
                    on_long=leave_out if config.skip_long else None,
                )
    if not measured:
        name = methods.target.name
        raise UserError(f"benchmark: no prompt fits the positions of {name}; lower --max-new-tokens")
    return measured, too_long


def _describe_tasks(
    config: BenchmarkConfig,
    tasks: Sequence[Task],
    contents: dict[str, str],
    too_long: set[tuple[str, str, int]],
) -> dict[str, dict[str, Any]]:
    sources = {spec.name: spec.source for spec in config.tasks}
    described = {}
    for task in tasks:
        whole = task.name.partition("/")[0]
        described[task.name] = {
            "source": sources[whole],
            "fingerprint": contents[whole],
            "prompts": len(task.prompts),
            "too_long": sum(name == task.name for name, _, _ in too_long),
        }
    return described


def _peak(loading: int | None, measured: Sequence[Measurement]) -> int | None:
    """Most memory in use while everything was loaded or measured; None where nothing is known."""
    peaks = [loading, *(run.peak_bytes for one in measured for run in one.runs.values())]
    return max((peak for peak in peaks if peak is not None), default=None)


def read_task(spec: TaskSpec, turns: int) -> Task:
    """All prompts of a task.

    Raises:
        UserError: there are none, or they cannot be read.
    """
    if spec.source.startswith(HUB):
        from drafttrain.data.hub_prompts import read_hub_prompts  # imports `datasets`

        return Task(spec.name, read_hub_prompts(spec.source), turns)
    return Task(spec.name, read_prompts(spec.source), turns)


def limited(task: Task, limit: int | None) -> list[Task]:
    """Return the task's parts with at most this many prompts each, at equal distances."""
    return [Task(part.name, spread(part.prompts, limit), part.turns) for part in task.parts()]


def bucket(tokens: int) -> str:
    """The range of context lengths that a number of tokens belongs to, such as 256-511."""
    if tokens < FIRST_BUCKET:
        return f"0-{FIRST_BUCKET - 1}"
    low = 1 << (tokens.bit_length() - 1)
    return f"{low}-{2 * low - 1}"


def make_rows(measured: Sequence[Measurement], methods: Sequence[str]) -> list[dict[str, Any]]:
    """A row for each temperature, task and method, and over all tasks for each range of context lengths.

    Returns:
        `Row` as a dictionary, with `temperature`, `task`, `context` (None for all lengths) and `method`.
    """
    rows = []
    for temperature in dict.fromkeys(one.temperature for one in measured):
        here = [one for one in measured if one.temperature == temperature]
        lengths = sorted({one.prompt_tokens for one in here})
        parts = [
            (task, None, [one for one in here if one.task == task])
            for task in dict.fromkeys(one.task for one in here)
        ]
        parts.append((ALL, None, here))
        for context in dict.fromkeys(map(bucket, lengths)):
            parts.append((ALL, context, [one for one in here if bucket(one.prompt_tokens) == context]))
        for task, context, part in parts:
            table = tabulate(part)
            place = {"temperature": temperature, "task": task, "context": context}
            rows += [{**place, "method": method, **asdict(table[method])} for method in methods]
    return rows


def harness_share(measured: Sequence[Measurement]) -> dict[str, float]:
    """What measuring itself took: seconds of the measured turns outside the methods' runs, and their share of
    the turns' time. Loading and warm-up are no part of either."""
    known = [one for one in measured if one.harness_seconds is not None]
    outside = sum(one.harness_seconds for one in known)
    inside = sum(run.seconds for one in known for run in one.runs.values())
    return {"seconds": outside, "share": outside / (outside + inside) if known else 0.0}
