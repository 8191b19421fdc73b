"""`drafttrain benchmark`: any methods on any tasks with one target, interleaved.

Nothing is tuned: the command line names what is compared, and all prompts are reported.
`measurements.jsonl` is written turn by turn, and an interrupted benchmark continues there.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from drafttrain.data.chat import template_hash, tokenizer_hash
from drafttrain.data.config import HUB
from drafttrain.data.prompts import Task, read_prompts, spread
from drafttrain.evaluation.benchmark_config import BenchmarkConfig, TaskSpec
from drafttrain.evaluation.config import ALL
from drafttrain.evaluation.measure import MeasurementLog, check_lengths, measure_tasks
from drafttrain.evaluation.memory import covered, peak_bytes
from drafttrain.evaluation.methods import Methods
from drafttrain.evaluation.metrics import Measurement, by_context, cpu_contention, tabulate
from drafttrain.evaluation.report import print_benchmark
from drafttrain.evaluation.stock import load_stock
from drafttrain.inference.params import SamplingParams
from drafttrain.kernels.machine import describe_machine, dtype_name
from drafttrain.target_lm.loading import load_for_decoding
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint
from drafttrain.utils.machine import check_quiet
from drafttrain.utils.provenance import git_commit, versions
from drafttrain.utils.writing import write_json

FORMAT_VERSION = 1  # of benchmark.json
SETTINGS = ("limit", "turns", "temperatures", "repeats", "max_new_tokens", "seed", "skip_long")


def benchmark(config: BenchmarkConfig, out: str | os.PathLike) -> dict[str, Any]:
    """Measure all methods on all tasks and print a table for each task and temperature.

    Args:
        out: folder to write to: `benchmark.json` (what is returned) and, as it goes, `measurements.jsonl`. A
            benchmark of the same things that was interrupted, or had fewer prompts, repeats or temperatures,
            is continued.

    Raises:
        UserError: settings, prompts or a bundle are unusable, the folder holds a benchmark of other things, a
            prompt is too long, or the machine is busy and `busy` is "refuse".
    """
    out, console = Path(out), Console()
    config.check()
    read = {spec.name: read_task(spec, config.turns) for spec in config.tasks}
    tasks = [part for task in read.values() for part in limited(task, config.limit)]
    if warning := check_quiet(refuse=config.busy == "refuse"):
        console.print(f"[yellow]timings will be poor:[/] {warning}", highlight=False, soft_wrap=True)
    target = load_for_decoding(config.target, dtype=config.dtype, device=config.device)
    if not config.skip_long:
        check_lengths(target, tasks, config.max_new_tokens)
    first = tasks[0].prompts[0].token_ids(target.tokenizer)
    stock = load_stock(target, config.dtype == "auto", first, out)
    methods = Methods(target, config.methods, stock)
    for warning in methods.warnings:
        console.print(warning, style="yellow", markup=False, highlight=False, soft_wrap=True)
    contents = {name: fingerprint([asdict(p) for p in task.prompts]) for name, task in read.items()}
    dtype, machine = dtype_name(target.dtype), describe_machine(target.device, target.dtype)
    text = tokenizer_hash(target.tokenizer), template_hash(target.tokenizer)
    depends = [target.fingerprint, *text, dtype, config.max_new_tokens, config.seed, machine, versions()]
    key = fingerprint([*depends, stock.dtype, methods.identity, contents])
    log = MeasurementLog(out / "measurements.jsonl", key, replace=False)
    loading = peak_bytes(target.device)
    measured, too_long = _measure(config, methods, tasks, log)
    peaks = [loading, *(run.peak_bytes for m in measured for run in m.runs.values())]
    peak = max((peak for peak in peaks if peak is not None), default=None)
    sources = {spec.name: spec.source for spec in config.tasks}
    summary = {
        "format_version": FORMAT_VERSION,
        "target": {"name": config.target, "dtype": dtype, "fingerprint": target.fingerprint},
        "settings": {name: getattr(config, name) for name in SETTINGS},
        "methods": methods.described,
        "tasks": {
            task.name: {
                "source": sources[whole := task.name.partition("/")[0]],
                "fingerprint": contents[whole],
                "prompts": len(task.prompts),
                "too_long": sum(name == task.name for name, _, _ in too_long),
            }
            for task in tasks
        },
        **conditions(target, measured),
        "harness": harness_share(measured),
        "peak_memory": {"bytes": peak, "covers": covered(target.device)},
        "rows": make_rows(measured, list(methods.described)),
    }
    write_json(out / "benchmark.json", summary)
    print_benchmark(summary, console)
    return summary


def _measure(
    config: BenchmarkConfig, methods: Methods, tasks: Sequence[Task], log: MeasurementLog
) -> tuple[list[Measurement], set[tuple[str, str, int]]]:
    """Return all measurements, and the chat turns left out because they are too long: task, prompt, turn."""
    measured, too_long = [], set()
    for temperature in config.temperatures:
        measured += measure_tasks(
            methods.target,
            methods.at(SamplingParams(temperature, seed=config.seed)),
            tasks,
            log,
            max_new_tokens=config.max_new_tokens,
            repeats=config.repeats,
            temperature=temperature,
            too_long=too_long if config.skip_long else None,
        )
    if not measured:
        raise UserError(
            f"max_new_tokens: no prompt fits the positions of {methods.target.name} with "
            f"{config.max_new_tokens} new tokens; lower --max-new-tokens"
        )
    return measured, too_long


def conditions(target: FrozenTarget, measured: Sequence[Measurement]) -> dict[str, Any]:
    """Return when, where and with what was measured, for the record."""
    contention = cpu_contention(measured)
    return {
        "measured": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {**describe_machine(target.device, target.dtype), "load": contention},
        "cpu_contention": contention,
        "versions": versions(),
        "commit": git_commit(),
    }


def read_task(spec: TaskSpec, turns: int) -> Task:
    """Read all prompts of a task.

    Raises:
        UserError: there are none, or they cannot be read.
    """
    if spec.source.startswith(HUB):
        from drafttrain.data.hub_prompts import read_hub_prompts  # imports `datasets`

        return Task(spec.name, read_hub_prompts(spec.source), turns)
    return Task(spec.name, read_prompts(spec.source), turns)


def limited(task: Task, limit: int | None) -> list[Task]:
    """Return the groups of a task, each with at most this many prompts, evenly spaced."""
    return [Task(part.name, spread(part.prompts, limit), part.turns) for part in task.parts()]


def make_rows(measured: Sequence[Measurement], methods: Sequence[str]) -> list[dict[str, Any]]:
    """Return a row for each temperature, task and method, and over all tasks for each range of context
    lengths: `Row` as a dictionary, with `temperature`, `task`, `context` (None for all lengths) and
    `method`."""
    rows = []
    for temperature in dict.fromkeys(m.temperature for m in measured):
        here = [m for m in measured if m.temperature == temperature]
        names = dict.fromkeys(m.task for m in here)
        parts = {(name, None): [m for m in here if m.task == name] for name in names}
        parts[ALL, None] = here
        parts |= {(ALL, context): part for context, part in by_context(here).items()}
        for (task, context), part in parts.items():
            table = tabulate(part)
            place = {"temperature": temperature, "task": task, "context": context}
            rows += [{**place, "method": method, **asdict(table[method])} for method in methods]
    return rows


def harness_share(measured: Sequence[Measurement]) -> dict[str, float]:
    """Return the overhead of measuring: seconds of the measured turns outside the methods' runs, and their
    share of the turns' time. Neither includes loading and warm-up."""
    known = [m for m in measured if m.harness_seconds is not None]
    outside = sum(m.harness_seconds for m in known)
    inside = sum(run.seconds for m in known for run in m.runs.values())
    return {"seconds": outside, "share": outside / (outside + inside) if known else 0.0}
