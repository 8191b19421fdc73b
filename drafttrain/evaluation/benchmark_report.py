"""The result of a benchmark on the terminal."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from drafttrain.evaluation.config import ALL, AUTOREGRESSIVE, TRANSFORMERS
from drafttrain.evaluation.report import describe_drafting, print_flags, task_table

COLUMNS = (  # heading, key of the row, format
    ("accept\nlen", "accept_len", "{:.2f}"),
    ("drafts\n/ step", "verify_per_step", "{:.1f}"),
    ("tokens\n/ s", "tokens_per_second", "{:.1f}"),
    ("speedup", "speedup", "{:.2f}x"),
    ("against\ngenerate", "speedup_transformers", "{:.2f}x"),
    ("spread", "spread", "{:.0%}"),
    ("same\noutput", "identical", "{:.0%}"),
    ("peak\nGB", "peak_gb", "{:.2f}"),
)
BRIEF = (("accept_len", "{:.2f}"), ("tokens_per_second", "{:.1f}"), ("speedup", "{:.2f}x"))


def print_benchmark(summary: dict[str, Any], console: Console) -> None:
    """Print what `benchmark` wrote to benchmark.json."""
    tables: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in summary["rows"]:
        place = row["temperature"], row["task"], row["context"]
        peak = None if row["peak_bytes"] is None else row["peak_bytes"] / 1e9
        tables.setdefault(place, {})[row["method"]] = {**row, "peak_gb": peak}
    several = len(summary["tasks"]) > 1
    by_context: dict[float, list[tuple[str, dict[str, dict[str, Any]]]]] = {}
    for (temperature, task, context), rows in tables.items():
        if context is not None:
            by_context.setdefault(temperature, []).append((context, rows))
        elif task != ALL or several:
            title = f"{task}, {_named(temperature)}"
            console.print("\n", task_table(title, rows, COLUMNS), sep="")
            for method, row in rows.items() if task == ALL or not several else ():
                if row["acceptance_by_depth"]:
                    console.print(escape(f"{method}: {describe_drafting(row)}"), highlight=False)
            print_flags(title, rows, console)
    for temperature, buckets in by_context.items():
        if len(buckets) > 1:
            console.print("\n", _context_table(_named(temperature), buckets), sep="")
    for line in _notes(summary):
        console.print(escape(line), highlight=False)


def _named(temperature: float) -> str:
    return f"temperature {temperature:g}" if temperature else "greedy"


def _context_table(title: str, buckets: list[tuple[str, dict[str, dict[str, Any]]]]) -> Table:
    """Methods by range of context lengths."""
    table = Table(
        title=f"all tasks by tokens of context, {title}",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    for heading, justify in (("context", "left"), ("answers", "right"), ("method", "left")):
        table.add_column(heading, justify=justify, overflow="fold")
    for key, _ in BRIEF:
        table.add_column(key.replace("_per_second", " / s"), justify="right", no_wrap=True)
    for context, rows in buckets:
        for i, (method, row) in enumerate(rows.items()):
            if method in (AUTOREGRESSIVE, TRANSFORMERS) and len(rows) > 2:
                continue
            cells = ("" if row[key] is None else form.format(row[key]) for key, form in BRIEF)
            is_first = i == min(2, len(rows) - 1)
            place = (context, str(row["prompts"])) if is_first else ("", "")
            table.add_row(*place, escape(method), *cells)
    return table


def _notes(summary: dict[str, Any]) -> list[str]:
    machine, memory, settings = summary["machine"], summary["peak_memory"], summary["settings"]
    device = machine.get("gpu") or f"{machine['threads']} threads of {machine['processor']}"
    repeats = f"{settings['repeats']} repeat{'s' if settings['repeats'] > 1 else ''}"
    lines = [
        "accept_len: tokens per target forward, the target's own token included. speedup: ratio of "
        "tokens per second against our own autoregressive decoding; spread: interquartile range of the "
        "repeats' speedups. Definitions: docs/benchmark.md",
        f"{summary['target']['name']}, {summary['target']['dtype']}, {device}, at most "
        f"{settings['max_new_tokens']} new tokens, batch 1, {repeats}",
    ]
    lines.append(f"generate of transformers in {summary['methods'][TRANSFORMERS]['dtype']}")
    if memory["bytes"] is not None:
        lines.append(f"peak memory {memory['bytes'] / 1e9:.2f} GB: {memory['covers']}")
    for name, task in summary["tasks"].items():
        if task["too_long"]:
            lines.append(f"{name}: {task['too_long']} chat turns left out, too long for the target")
    return lines
