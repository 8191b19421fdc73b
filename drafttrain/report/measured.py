"""The sections from measurements: speedup, context, time and memory, acceptance, verified tokens."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from drafttrain.evaluation.metrics import AUTOREGRESSIVE, BASELINES, Row, by_context, tabulate
from drafttrain.evaluation.sweep import Point, pareto_front
from drafttrain.report.panels import FEW, Bar, Bars, Chart, Section, Series, Table, span
from drafttrain.report.raw import Benchmark, Group
from drafttrain.utils.shares import below_all

COLUMNS = (  # heading, key of the row, format
    ("tokens/s", "tokens_per_second", "{:.1f}"),
    ("speedup", "speedup", "{:.2f}"),
    ("against generate", "speedup_transformers", "{:.2f}"),
    ("accept_len", "accept_len", "{:.2f}"),
    ("without repeats", "accept_len_nonrepeated", "{:.2f}"),
    ("repeated tokens", "repetition", "{:.0%}"),
    ("accept_rate", "accept_rate", "{:.2f}"),
    ("drafts per step", "verify_per_step", "{:.1f}"),
    ("outside forwards", "outside_share", "{:.0%}"),
    ("same text", "identical", "{:.0%}"),
)
KINDS = {  # of the bars of speedups
    "best": "method of the headline",
    "plain": "other drafting",
    "baseline": "without drafts",
    "bad": "slower than autoregressive",
    "whisker": "95 % interval",
    "ceiling": "accept_len: speedup at most",
}
PARTS = {"prefill": "prompt", "draft": "drafting", "verify": "verifying", "other": "rest"}


@dataclass
class Headline:
    """The method at the head of the page, over all greedy tasks, or over those of the lowest temperature.

    Attributes:
        method: its name.
        tuned: whether it was chosen before, on tuning prompts; else it is the fastest of those measured.
        row: its row.
        of: number of drafting methods that it was chosen from.
        tasks: names of the tasks.
    """

    method: str
    tuned: bool
    row: Row
    of: int
    tasks: list[str]


def headline(benchmark: Benchmark, measured: Sequence[Group]) -> Headline | None:
    """Return the page's main method, over all tasks or else over one; None if no method drafts there."""
    coldest = min(m.temperature for m in measured)
    tree = benchmark.settings.get("tree")

    def rank(task: Group) -> tuple[bool, bool, int]:
        return tree in task.drafting, task.has_baseline, len(task.measurements)

    # a task that was measured with several sets of methods (another tree was chosen) counts once: the last of
    # the best, because the file has the newest last
    by_task: dict[str, Group] = {}
    for task in (m for m in measured if m.temperature == coldest):
        if task.task not in by_task or rank(task) >= rank(by_task[task.task]):
            by_task[task.task] = task
    chosen = list(by_task.values())
    repeats = {next(iter(m.rows.values())).repeats for m in chosen}
    common = [name for name in chosen[0].rows if all(name in m.rows for m in chosen)]
    drafting = [name for name in common if all(name in m.drafting for m in chosen)]
    if len(repeats) > 1 or not drafting:  # totals over tasks would be of unequal things
        chosen = [task for task in chosen if task.drafting]
        if not chosen:
            return None
        chosen = [max(chosen, key=rank)]
        common, drafting = list(chosen[0].rows), chosen[0].drafting
    rows = tabulate([task for m in chosen for task in m.only(common)])
    tuned = tree in drafting and benchmark.settings.get("tuning") != []  # a single tree is not tuned
    method = tree if tuned else max(drafting, key=lambda name: rows[name].tokens_per_second)
    return Headline(method, tuned, rows[method], len(drafting), [m.name for m in chosen])


def joined(measured: Sequence[Group]) -> list[Group]:
    """Join the tasks that were measured with the same methods, repeats and temperature."""
    by_key: dict[tuple, list[Group]] = {}
    for task in measured:
        key = task.temperature, frozenset(task.rows), next(iter(task.rows.values())).repeats
        by_key.setdefault(key, []).append(task)
    every, result = {task.task for task in measured}, []
    for parts in by_key.values():
        names = [task.task for task in parts]
        name = "all tasks" if len(names) > 1 and every <= {*names} else ", ".join(names)
        joint = Group(name, parts[0].temperature, [m for task in parts for m in task.measurements])
        result.append(parts[0] if len(parts) == 1 else joint)
    return result


def speed(measured: Sequence[Group], best: str | None) -> Section:
    """Return bars of speedup by task and method, and all rows."""
    section, kinds = Section("speed"), set()
    for task in measured:
        table, numbers = rows_table(task)
        section.tables.append(table)
        if not task.has_baseline:
            section.notes.append(
                f"{task.name}: autoregressive decoding was not measured with these methods, so there "
                "is no speedup."
            )
            continue
        bars = [_speed_bar(task, name, best, numbers[name]) for name in task.rows if name != AUTOREGRESSIVE]
        if not bars:  # autoregressive decoding alone
            continue
        section.panels.append(Bars(f"{task.name}: {task.answers}", bars, "speedup", 1.0, "autoregressive"))
        kinds |= {"whisker", *(bar.kind for bar in bars)}
        kinds |= {"ceiling" for bar in bars if bar.ceiling is not None}
    section.legend = [(words, kind, False) for kind, words in KINDS.items() if kind in kinds]
    return section


def _speed_bar(task: Group, name: str, best: str | None, flags: list[int]) -> Bar:
    row = task.rows[name]
    low, high = row.speedup_interval or (None, None)
    kind = "baseline" if name in BASELINES else "bad" if row.speedup < 1 else "plain"
    if name == best and kind == "plain":
        kind = "best"
    note = f"{name}: {row.speedup:.2f} times as fast"
    if row.speedup_interval:
        note += f" (95 % interval {low:.2f} to {high:.2f})"
    if row.accept_len is not None:
        note += f", accept_len {row.accept_len:.2f}, {row.verify_per_step:.1f} draft tokens per step"
    note = "; ".join([note, *row.flags])
    text = f"{row.speedup:.2f}×" + _bounds(row)
    return Bar(name, row.speedup, text, note, kind, low, high, row.accept_len, flags)


def _bounds(row: Row) -> str:
    """Format the confidence interval of the speedup; return "" if there is none (a single prompt)."""
    return " ({:.2f}–{:.2f})".format(*row.speedup_interval) if row.speedup_interval else ""


def rows_table(task: Group) -> tuple[Table, dict[str, list[int]]]:
    """Return all numbers of a group, and the numbers of the table's notes that concern each method."""
    notes = list(dict.fromkeys(flag for row in task.rows.values() for flag in row.flags))
    numbers = {name: [notes.index(flag) + 1 for flag in row.flags] for name, row in task.rows.items()}
    rows = []
    for name, row in task.rows.items():
        cells = {key: cell(getattr(row, key), form) for _, key, form in COLUMNS}
        if row.identical is not None:
            cells["identical"] = f"{below_all(row.identical):.0%}"
        if row.speedup is not None:
            cells["speedup"] += _bounds(row)
        rows.append([name, *cells.values(), " ".join(f"⚑{n}" for n in numbers[name])])
    head = ["method", *(heading for heading, _, _ in COLUMNS), "flags"]
    return Table(f"{task.name}: {task.answers}", head, rows, notes), numbers


def cell(value: float | None, form: str) -> str:
    """Return a number as the text of a table's cell, a dash where there is none."""
    return "–" if value is None else form.format(value)


def context(measured: Sequence[Group], style: dict[str, int]) -> Section:
    """Return speedup by range of context lengths, where there are several."""
    section = Section("context")
    for task in measured:
        parts = by_context(task.measurements)
        if len(parts) < 2 or not task.has_baseline:
            continue
        rows = {name: tabulate(part) for name, part in parts.items()}
        xs = [statistics.mean(m.prompt_tokens for m in part) for part in parts.values()]
        series, table = [], []
        for method in (name for name in task.rows if name != AUTOREGRESSIVE):
            lengths = [rows[name][method] for name in parts]
            texts = [f"{row.speedup:.2f}" + _bounds(row) for row in lengths]
            table.append([method, *texts])
            if method in style:
                notes = [
                    f"{method}, {name} tokens of context: speedup {text}" for name, text in zip(parts, texts)
                ]
                series.append(Series(method, style[method], xs, [row.speedup for row in lengths], notes))
        head = [f"{name} tokens: {next(iter(part.values())).prompts} answers" for name, part in rows.items()]
        section.tables.append(Table(f"{task.name}: speedup", ["method", *head], table))
        if series:
            frame = (min(xs) * 0.9, max(xs) * 1.1), span([y for s in series for y in s.ys], 0.0)
            labels = "tokens of context", "speedup"
            section.panels.append(Chart(f"{task.name}: by context", series, *labels, *frame, log_x=True))
            section.legend += [(s.name, s.style, True) for s in series]
    section.legend = list(dict.fromkeys(section.legend))
    return section


def time_and_memory(measured: Sequence[Group]) -> Section:
    """Return time per token, split, and peak memory, by method."""
    section = Section("time")
    for task in measured:
        bars, table = [], []
        for name, row in task.rows.items():
            ms, split = 1000 * row.seconds / max(row.new_tokens, 1), row.time_split or {}
            shares = [cell(split.get(part), "{:.0%}") for part in PARTS]
            peak = None if row.peak_bytes is None else row.peak_bytes / 1e9
            table.append([name, f"{ms:.1f}", *shares, cell(peak, "{:.2f}")])
            note = ", ".join(f"{words} {share}" for words, share in zip(PARTS.values(), shares))
            parts = [(part, ms * split[part]) for part in PARTS if split]
            bars.append(Bar(name, ms, f"{ms:.1f} ms", f"{name}: {note}", "baseline", parts=parts))
        section.panels.append(Bars(f"{task.name}: time per token", bars, "ms per emitted token"))
        head = ["method", "ms per token", *PARTS.values(), "peak GB"]
        section.tables.append(Table(f"{task.name}: {task.answers}", head, table))
    section.legend = [(words, part, False) for part, words in PARTS.items()]
    section.legend.append(("not split: another engine", "baseline", False))
    return section


def styles(measured: Sequence[Group]) -> dict[str, int]:
    """Return the style number (color and marker) of each drafting method, the same in all figures."""
    names = dict.fromkeys(name for task in measured for name in task.drafting)
    return {name: i for i, name in enumerate(names)}


def acceptance(measured: Sequence[Group], style: dict[str, int]) -> Section:
    """Return acceptance by depth, and the share of steps that got as far into the draft."""
    section, used = Section("acceptance", pairs=True), set()
    for task in measured:
        depth, position = [], []
        for name in task.drafting:
            stats = task.stats[name]
            if not stats.offered:
                continue
            used.add(name)
            xs = [float(d) for d in range(1, len(stats.offered) + 1)]
            pairs = list(enumerate(zip(stats.granted, stats.offered), 1))
            few = [judged < FEW for judged in stats.offered]
            notes = [f"{name}, depth {d}: {g} of {o} accepted" for d, (g, o) in pairs]
            depth.append(Series(name, style[name], xs, stats.acceptance_by_depth, notes, open=few))
            notes = [f"{name}, position {d}: {g} of {stats.steps} steps" for d, (g, _) in pairs]
            reached = [accepted / stats.steps for accepted in stats.granted]
            position.append(Series(name, style[name], xs, reached, notes, open=few))
        if depth:
            frame = (0.7, max(len(series.xs) for series in depth) + 0.3), (0.0, 1.0)
            for kind, series, words in (
                ("depth", depth, "accepted of those judged"),
                ("position", position, "steps that accepted so far"),
            ):
                chart = Chart(f"{task.name}: by {kind}", series, kind, words, *frame)
                chart.percent = chart.counts = True
                section.panels.append(chart)
    section.legend = [(name, number, True) for name, number in style.items() if name in used]
    return section


def verify_accept(
    measured: Sequence[Group], style: dict[str, int], sweeps: dict[str, list[Point]]
) -> Section:
    """Return τ (accept_len) against γ (draft tokens per step), of sweeps and of the benchmark's rows."""
    section = Section("verified")
    families = dict.fromkeys(point.family for points in sweeps.values() for point in points)
    numbers = {family: len(style) + i for i, family in enumerate(families)}
    for name, points in sweeps.items():
        section.panels.append(sweep_chart(f"sweep {name}", points, numbers))
    for task in measured:
        series = [
            Series(
                name,
                style[name],
                [row.verify_per_step],
                [row.accept_len],
                [f"{name}: {row.verify_per_step:.2f} verified per step, accept_len {row.accept_len:.3f}"],
                line=False,
            )
            for name, row in task.rows.items()
            if name in task.drafting
        ]
        if series:
            section.panels.append(_scatter(task.name, series))
    section.legend = [(f"{family} (sweep)", number, True) for family, number in numbers.items()]
    section.legend += [(name, number, False) for name, number in style.items()]
    if not sweeps:
        section.notes.append(
            "Points of more trees: `drafttrain benchmark --table sweep --method BUNDLE --task FILE --trees … "
            "--out DIR`, then `--sweep DIR/points.jsonl`."
        )
    return section


def sweep_chart(title: str, points: Sequence[Point], numbers: dict[str, int]) -> Chart:
    """Return the points of a sweep with the Pareto front of each family.

    Args:
        numbers: styles of the families.
    """
    series = []
    for family in dict.fromkeys(point.family for point in points):
        mine = [point for point in points if point.family == family]
        front = [(p.verify_per_step, p.accept_len) for p in pareto_front(mine)]
        notes = [
            f"{p.tree}: {p.verify_per_step:.2f} verified per step, accept_len {p.accept_len:.3f}, "
            f"{p.repetition:.0%} repeated"
            for p in mine
        ]
        xs, ys = [p.verify_per_step for p in mine], [p.accept_len for p in mine]
        series.append(Series(family, numbers[family], xs, ys, notes, front=front))
    return _scatter(title, series)


def _scatter(title: str, series: list[Series]) -> Chart:
    xs = [x for s in series for x in s.xs if x > 0]
    ys = [y for s in series for y in s.ys]
    log = bool(xs) and max(xs) > 8 * min(xs)
    x_range = (min(xs) * 0.85, max(xs) * 1.15) if log else span(xs or [1.0], 0.0)
    for s in series if log else ():  # a policy that verifies nothing has no place on a logarithmic axis
        places = [i for i, x in enumerate(s.xs) if x > 0]
        s.xs, s.ys, s.notes = ([row[i] for i in places] for row in (s.xs, s.ys, s.notes))
        s.front = [point for point in s.front if point[0] > 0]
    labels = "γ: draft tokens per step", "τ: accept_len"
    return Chart(title, series, *labels, x_range, span(ys, 1.0), log)
