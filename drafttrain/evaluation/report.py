"""The result of an evaluation on the terminal: a table per task, and what to distrust about it."""

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
    """Prints what `evaluate` wrote to summary.json."""
    for task, rows in summary["tasks"].items():
        console.print("\n", task_table(task, rows), sep="")
        by_flag: dict[str, list[str]] = {}
        for method, row in rows.items():
            for flag in row["flags"]:
                by_flag.setdefault(flag, []).append(method)
        for flag, methods in by_flag.items():
            console.print(f"[yellow]{escape(task)}, {', '.join(methods)}:[/] {escape(flag)}", highlight=False)
    machine, lossless = summary["machine"], summary["lossless"]
    lines = [
        "accept_len: tokens per target forward, the target's own token included; "
        "speedup: ratio of total times against our own autoregressive decoding",
        f"{summary['dtype']}, {machine['threads']} threads of {machine['processor']}, at most "
        f"{summary['max_new_tokens']} new tokens, greedy, batch 1",
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


def task_table(task: str, rows: dict[str, dict[str, Any]]) -> Table:
    """The rows of one task, by method; 80 columns wide, as plain terminals and log files are."""
    some = next(iter(rows.values()))
    repeats = f", {some['repeats']} repeats" if some["repeats"] > 1 else ""
    table = Table(
        title=f"{escape(task)}: {some['prompts']} answers{repeats}",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=0,
    )
    table.add_column("method", overflow="fold", max_width=18)
    for heading, _, _ in COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for method, row in rows.items():
        cells = ("" if row[key] is None else form.format(row[key]) for _, key, form in COLUMNS)
        name = NAMES.get(method) or method.replace(":", "\n").replace(",", "\n")
        table.add_row(name, *cells)
    drafted = [row for row in rows.values() if row["acceptance_by_depth"]]
    if drafted:
        by_depth = " ".join(f"{share:.2f}" for share in drafted[-1]["acceptance_by_depth"])
        split = ", ".join(f"{part} {share:.0%}" for part, share in drafted[-1]["time_split"].items())
        table.caption = f"accepted by depth: {by_depth}; time: {split}"
        table.caption_justify = "left"
    return table


def describe_difference(difference: dict[str, Any]) -> str:
    """One line about two outputs that part: is it a near-tie?"""
    d = difference
    return (
        f"{d['task']}, prompt {d['prompt']}: at {d['position']} {d['method']} has token {d['found']}, "
        f"plain decoding {d['expected']}; the target's two best logits differ by {d['gap']:.2g} there "
        f"(standard deviation {d['logit_std']:.2g})"
    )
