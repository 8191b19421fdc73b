"""Print tables of benchmarks and evaluations, at most 80 columns wide, for log files and plain terminals."""

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from drafttrain.evaluation.config import ALL, AUTOREGRESSIVE, TRANSFORMERS
from drafttrain.utils.shares import below_all

Rows = dict[str, dict[str, Any]]  # `metrics.Row` as a dictionary, by method
COLUMNS = (  # heading, key of the row, format
    ("tokens\n/s", "tokens_per_second", "{:.1f}"),
    ("speedup", "speedup", "{:.2f}x"),
    ("95 %\ninterval", "speedup_interval", "{0[0]:.2f}-{0[1]:.2f}"),
    ("against\nHF", "speedup_transformers", "{:.2f}x"),
    ("accept\nlen", "accept_len", "{:.2f}"),
    ("drafts\n/step", "verify_per_step", "{:.1f}"),
    ("same\ntext", "identical", "{:.0%}"),
    ("peak\nGB", "peak_gb", "{:.2f}"),
)
NAMES = {AUTOREGRESSIVE: "autoregressive", TRANSFORMERS: "transformers\ngenerate"}
LEGEND = (
    "speedup: ratio of tokens per second against our own autoregressive decoding, with its 95 % interval "
    "over prompts; against HF: against generate of transformers; accept len: tokens per target forward, the "
    "target's own token included; same text: share of texts identical to autoregressive decoding. All "
    "definitions: docs/metrics.md"
)
MISSING = "–"


def print_tables(summary: dict[str, Any], console: Console) -> None:
    """Print what `evaluate` wrote to summary.json."""
    several_tasks = len(summary["tasks"].keys() - {ALL}) > 1
    for task, rows in summary["tasks"].items():
        if several_tasks or task != ALL:  # it would repeat the table before
            print_task(task, rows, console)
    stock = summary["transformers"]["dtype"]
    lines = [LEGEND, _conditions(summary, summary["dtype"], stock, summary["max_new_tokens"])]
    if summary["tuning"]:
        trials = "; ".join(f"{t['tree']} {t['tokens_per_second']:.1f}" for t in summary["tuning"])
        lines.append(f"tokens per second on the tuning prompts: {trials}")
    if lossless := summary["lossless"]:
        same = lossless["prompts"] - lossless["mismatches"]
        lines.append(f"fp32: {same} of {lossless['prompts']} outputs equal plain decoding token by token")
        if others := lossless.get("transformers_mismatches"):
            lines.append(f"`generate` of transformers differs from it in {others}")
        lines += [f"  {describe_difference(difference)}" for difference in lossless["differences"]]
    _print_lines(lines, console)


def print_benchmark(summary: dict[str, Any], console: Console) -> None:
    """Print what `benchmark` wrote to benchmark.json."""
    tables: dict[tuple[float, str, str | None], Rows] = {}
    for row in summary["rows"]:
        place = row["temperature"], row["task"], row["context"]
        tables.setdefault(place, {})[row["method"]] = row
    several_tasks = len(summary["tasks"]) > 1
    for (temperature, task, context), rows in tables.items():
        ranges = [at for at in tables if at[0] == temperature and at[2] is not None]
        if len(ranges) < 2 if context else task == ALL and not several_tasks:
            continue  # it would repeat the table before
        mode = f"temperature {temperature:g}" if temperature else "greedy"
        length = f", {context} tokens of context" if context else ""
        is_whole = context is None and (task == ALL or not several_tasks)
        print_task(f"{task}, {mode}{length}", rows, console, details=is_whole)
    settings, memory = summary["settings"], summary["peak_memory"]
    dtypes = summary["target"]["dtype"], summary["methods"][TRANSFORMERS]["dtype"]
    conditions = _conditions(summary, *dtypes, settings["max_new_tokens"])
    repeats = f"{settings['repeats']} repeat{'s' if settings['repeats'] > 1 else ''}"
    lines = [LEGEND, f"{summary['target']['name']}, {conditions}, {repeats}"]
    if memory["bytes"] is not None:
        lines.append(f"peak memory {memory['bytes'] / 1e9:.2f} GB: {memory['covers']}")
    for name, task in summary["tasks"].items():
        if task["too_long"]:
            lines.append(f"{name}: {task['too_long']} chat turns left out, too long for the target")
    _print_lines(lines, console)


def print_task(title: str, rows: Rows, console: Console, details: bool = True) -> None:
    """Print the table of a task, a line on each drafting method, and the reasons to distrust rows.

    Args:
        details: False leaves out the lines on the methods.
    """
    console.print("\n", task_table(title, rows), sep="")
    if details:
        drafting = {name: row for name, row in rows.items() if row["acceptance_by_depth"]}
        _print_lines([f"{name}: {describe_drafting(row)}" for name, row in drafting.items()], console)
    by_flag: dict[str, list[str]] = {}
    for method, row in rows.items():
        for flag in row["flags"]:
            by_flag.setdefault(flag, []).append(method)
    for flag, methods in by_flag.items():
        names = "all methods" if len(methods) == len(rows) > 3 else ", ".join(methods)
        text = f"[yellow]{escape(f'{title}, {names}:')}[/] {escape(flag)}"
        console.print(text, highlight=False, soft_wrap=True)


def task_table(title: str, rows: Rows) -> Table:
    """Return the rows of one task, by method; at most 80 columns wide."""
    some = next(iter(rows.values()))
    repeats = f", {some['repeats']} repeats" if some["repeats"] > 1 else ""
    answers = "1 answer" if some["prompts"] == 1 else f"{some['prompts']} answers"
    table = Table(
        title=f"{escape(title)}: {answers}{repeats}",
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    table.add_column("method", overflow="fold", max_width=18)
    for heading, _, _ in COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for method, row in rows.items():
        peak = row.get("peak_bytes")  # not recorded by older evaluations
        values = {**row, "peak_gb": None if peak is None else peak / 1e9}
        if values.get("identical") is not None:
            values["identical"] = below_all(values["identical"])
        cells = (MISSING if values.get(key) is None else form.format(values[key]) for _, key, form in COLUMNS)
        name = NAMES.get(method) or method.replace(":", "\n").replace(",", "\n")
        table.add_row(escape(name), *cells)
    return table


def describe_drafting(row: dict[str, Any]) -> str:
    """Return what the table leaves out about a row of our own loop: repetition, acceptance, time."""
    by_depth = " ".join(f"{share:.2f}" for share in row["acceptance_by_depth"])
    split = ", ".join(f"{part} {share:.0%}" for part, share in row["time_split"].items())
    length = row.get("accept_len_nonrepeated")
    nonrepeated = MISSING if length is None else f"{length:.2f}"
    return (
        f"{row['repetition']:.0%} of the tokens repeat earlier ones, accept_len of the others {nonrepeated}; "
        f"accepted by depth: {by_depth}; time: {split}"
    )


def describe_difference(difference: dict[str, Any]) -> str:
    """Return one line on where two outputs differ, with the numbers that separate a near-tie from a bug."""
    d = difference
    line = (
        f"{d['task']}, prompt {d['prompt']}, token {d['position'] + 1}: {d['expected']} by plain decoding, "
        f"{d['found']} by {d['method']}; the target's two best logits differ by {d['gap']:.3g} there"
    )
    if d["below_best"] is None:  # an output had ended
        return line
    share = d["below_best"] / d["logit_std"]
    return (
        f"{line}, the worse token is {d['below_best']:.3g} ({share:.2g} standard deviations) below the best, "
        f"rounding up to {d['noise']:.3g}"
    )


def _conditions(summary: dict[str, Any], dtype: str, stock_dtype: str, max_new_tokens: int) -> str:
    machine = summary["machine"]
    device = machine.get("gpu") or f"{machine['threads']} threads of {machine['processor']}"
    return f"{dtype} (transformers in {stock_dtype}), {device}, at most {max_new_tokens} new tokens, batch 1"


def _print_lines(lines: list[str], console: Console) -> None:
    for line in lines:
        console.print(escape(line), highlight=False)
