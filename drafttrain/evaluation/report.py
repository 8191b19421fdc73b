"""The result of an evaluation on the terminal: a table per task, and what to distrust about it."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from drafttrain.evaluation.metrics import AUTOREGRESSIVE, TRANSFORMERS

COLUMNS = (  # heading, key of the row, format
    ("accept_len", "accept_len", "{:.2f}"),
    ("without\nrepeats", "accept_len_fresh", "{:.2f}"),
    ("repeated\ntokens", "repetition", "{:.0%}"),
    ("drafts\n/ step", "verify_per_step", "{:.1f}"),
    ("tokens\n/ s", "tokens_per_second", "{:.1f}"),
    ("speedup", "speedup", "{:.2f}x"),
    ("against\ngenerate", "speedup_transformers", "{:.2f}x"),
    ("same\noutput", "identical", "{:.0%}"),
)
NAMES = {AUTOREGRESSIVE: "autoregressive", TRANSFORMERS: "transformers\ngenerate"}


def print_tables(summary: dict[str, Any], console: Console) -> None:
    """Print what `evaluate` wrote to summary.json."""
    for task, rows in summary["tasks"].items():
        table = task_table(task, rows)
        if drafted := [row for row in rows.values() if row["acceptance_by_depth"]]:
            table.caption, table.caption_justify = describe_drafting(drafted[-1]), "left"
        console.print("\n", table, sep="")
        print_flags(task, rows, console)
    machine, lossless = summary["machine"], summary["lossless"]
    # older evaluations ran both in one dtype
    stock = summary.get("transformers", {"dtype": summary["dtype"]})["dtype"]
    lines = [
        "accept_len: tokens per target forward, the target's own token included; "
        "speedup: ratio of tokens per second against our own autoregressive decoding",
        f"{summary['dtype']} (transformers in {stock}), {machine['threads']} threads of "
        f"{machine['processor']}, at most {summary['max_new_tokens']} new tokens, greedy, batch 1",
    ]
    if summary["tuning"]:
        trials = "; ".join(f"{t['tree']} {t['tokens_per_second']:.1f}" for t in summary["tuning"])
        lines.append(f"tokens per second on the tuning prompts: {trials}")
    if lossless:
        same = lossless["prompts"] - lossless["mismatches"]
        lines.append(f"fp32: {same} of {lossless['prompts']} outputs equal plain decoding token by token")
        lines += [f"  {describe_difference(difference)}" for difference in lossless["differences"]]
    for line in lines:
        console.print(escape(line), highlight=False)


def print_flags(task: str, rows: dict[str, dict[str, Any]], console: Console) -> None:
    """Print why rows should not be taken at their word, each reason once."""
    by_flag: dict[str, list[str]] = {}
    for method, row in rows.items():
        for flag in row["flags"]:
            by_flag.setdefault(flag, []).append(method)
    for flag, methods in by_flag.items():
        everything = len(methods) == len(rows) > 3
        names = "all methods" if everything else escape(", ".join(methods))
        text = f"[yellow]{escape(task)}, {names}:[/] {escape(flag)}"
        console.print(text, highlight=False, soft_wrap=True)


def describe_drafting(row: dict[str, Any]) -> str:
    """Acceptance by depth, and where the time went, of a row of our own loop."""
    by_depth = " ".join(f"{share:.2f}" for share in row["acceptance_by_depth"])
    split = ", ".join(f"{part} {share:.0%}" for part, share in row["time_split"].items())
    return f"accepted by depth: {by_depth}; time: {split}"


def task_table(
    task: str, rows: dict[str, dict[str, Any]], columns: Sequence[tuple[str, str, str]] = COLUMNS
) -> Table:
    """The rows of one task, by method; 80 columns wide, as plain terminals and log files are.

    Args:
        columns: heading, key of the row, format.
    """
    some = next(iter(rows.values()))
    repeats = f", {some['repeats']} repeats" if some["repeats"] > 1 else ""
    answers = "1 answer" if some["prompts"] == 1 else f"{some['prompts']} answers"
    table = Table(
        title=f"{escape(task)}: {answers}{repeats}",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    table.add_column("method", overflow="fold", max_width=18)
    for heading, _, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for method, row in rows.items():
        cells = ("" if row[key] is None else form.format(row[key]) for _, key, form in columns)
        name = NAMES.get(method) or method.replace(":", "\n").replace(",", "\n")
        table.add_row(escape(name), *cells)
    return table


def describe_difference(difference: dict[str, Any]) -> str:
    """One line about two outputs that part: is it a near-tie?"""
    d = difference
    return (
        f"{d['task']}, prompt {d['prompt']}: at {d['position']} {d['method']} has token {d['found']}, "
        f"plain decoding {d['expected']}; the target's two best logits differ by {d['gap']:.2g} there "
        f"(standard deviation {d['logit_std']:.2g})"
    )
