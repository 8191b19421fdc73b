"""The sections that measurements give: speedup, acceptance, verified tokens against accept_len."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drafttrain.evaluation.metrics import AUTOREGRESSIVE, TRANSFORMERS, Measurement, Row, tabulate
from drafttrain.evaluation.sweep import Point, pareto_front
from drafttrain.inference.stats import DecodeStats
from drafttrain.report.panels import Bar, Bars, Chart, Series, span
from drafttrain.report.raw import Benchmark, Group
from drafttrain.report.sections import FEW, Section, Table

BASELINES = (AUTOREGRESSIVE, TRANSFORMERS)


@dataclass
class Measured:
    """A group's rows.

    Attributes:
        group: the measurements.
        rows: by method, the fastest drafting first, what they are compared with last.
        stats: counts of the first repeat, by method; None for other engines.
    """

    group: Group
    rows: dict[str, Row]
    stats: dict[str, DecodeStats | None]

    @classmethod
    def of(cls, group: Group) -> "Measured":
        rows = tabulate(group.measurements)
        order = sorted(rows, key=lambda name: (name in BASELINES, -rows[name].tokens_per_second))
        stats = {name: first_counts(group.measurements, name) for name in order}
        return cls(group, {name: rows[name] for name in order}, stats)

    @property
    def drafting(self) -> list[str]:
        """Methods that draft in our own loop."""
        return [name for name, found in self.stats.items() if found is not None and found.verify_tokens]


@dataclass
class Headline:
    """What the page begins with: one method over all greedy tasks, or over those of the lowest temperature.

    Attributes:
        method: which.
        tuned: whether it was chosen before, on tuning prompts; else it is the fastest of those measured.
        row: its row.
        of: number of drafting methods that it was chosen from.
        tasks: over which tasks.
    """

    method: str
    tuned: bool
    row: Row
    of: int
    tasks: list[str]


def first_counts(measurements: Sequence[Measurement], method: str) -> DecodeStats | None:
    """Sum of a method's statistics over the first repeat of all turns; None if it has none."""
    found = [m.runs[method].stats for m in measurements if m.repeat == 0]
    return None if not found or found[0] is None else sum(found, DecodeStats())


def headline(benchmark: Benchmark, measured: Sequence[Measured]) -> Headline | None:
    """The method to begin with; None if no method drafts on all tasks."""
    coldest = min(m.group.temperature for m in measured)
    tree = benchmark.settings.get("tree")

    def rank(one: Measured) -> tuple[bool, bool, int]:
        return tree in one.drafting, one.group.has_baseline, len(one.group.measurements)

    # a task that was measured with several sets of methods (a tree chosen anew) counts once: the last of the
    # best, because the file has the newest last
    by_task: dict[str, Measured] = {}
    for one in (m for m in measured if m.group.temperature == coldest):
        if one.group.task not in by_task or rank(one) >= rank(by_task[one.group.task]):
            by_task[one.group.task] = one
    chosen = list(by_task.values())
    repeats = {next(iter(m.rows.values())).repeats for m in chosen}
    common = [name for name in chosen[0].rows if all(name in m.rows for m in chosen)]
    drafting = [name for name in common if all(name in m.drafting for m in chosen)]
    if len(repeats) > 1 or not drafting:  # totals over tasks would be of unequal things
        chosen = [max(chosen, key=rank)]
        common, drafting = list(chosen[0].rows), chosen[0].drafting
    if not drafting:
        return None
    everything = [one for m in chosen for one in m.group.only(common)]
    rows = tabulate(everything)
    tuned = tree in drafting
    method = tree if tuned else max(drafting, key=lambda name: rows[name].tokens_per_second)
    return Headline(method, tuned, rows[method], len(drafting), [m.group.name for m in chosen])


# speed


def speed(measured: Sequence[Measured], best: str | None) -> Section:
    """Bars of speedup by task and method, and all rows."""
    section = Section("speed", "Speedup")
    section.words = [
        "Tokens per second, prompt encoding included, divided by those of autoregressive decoding by the "
        "same engine in the same run. Methods take turns prompt by prompt; the time of a turn is the "
        "median over repeats. Whiskers are 95 % bootstrap intervals over prompts. The upright mark "
        "right of a bar is accept_len, tokens emitted per target forward: no speedup can pass it unless "
        "the baseline was slowed by something, and what lies between is the cost of drafting and "
        "verifying."
    ]
    for one in measured:
        table, numbers = rows_table(one)
        section.tables.append(table)
        if not one.group.has_baseline:
            section.notes.append(
                f"{one.group.name}: autoregressive decoding was not measured with these methods, so there "
                "is no speedup."
            )
            continue
        bars = [_speed_bar(one, name, best, numbers[name]) for name in one.rows if name != AUTOREGRESSIVE]
        words = ", ".join(f"{bar.label} {bar.text}" for bar in bars)
        title = f"{one.group.name}: {_answers(one)}"
        section.panels.append(Bars(title, words, bars, "speedup", 1.0, "autoregressive"))
    return section


def _answers(one: Measured) -> str:
    row = next(iter(one.rows.values()))
    repeats = f", {row.repeats} repeats" if row.repeats > 1 else ""
    return f"{row.prompts} answer{'s' if row.prompts > 1 else ''}{repeats}"


def _speed_bar(one: Measured, name: str, best: str | None, flags: list[int]) -> Bar:
    row = one.rows[name]
    low, high = row.speedup_interval
    kind = "baseline" if name in BASELINES else "bad" if row.speedup < 1 else "plain"
    if name == best and kind == "plain":
        kind = "best"
    note = f"{name}: {row.speedup:.2f} times as fast (95 % interval {low:.2f} to {high:.2f})"
    if row.accept_len is not None:
        note += f", accept_len {row.accept_len:.2f}, {row.verify_per_step:.1f} draft tokens per step"
    if row.flags:
        note += "; " + "; ".join(row.flags)
    text = f"{row.speedup:.2f}× ({low:.2f}–{high:.2f})"
    return Bar(name, row.speedup, text, low, high, row.accept_len, kind, note, flags)


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
    ("same output", "identical", "{:.0%}"),
)


def rows_table(one: Measured) -> tuple[Table, dict[str, list[int]]]:
    """All numbers of a group, and which of the table's notes concern each method."""
    notes: list[str] = []
    numbers: dict[str, list[int]] = {}
    rows = []
    for name, row in one.rows.items():
        for flag in row.flags:
            if flag not in notes:
                notes.append(flag)
        numbers[name] = [notes.index(flag) + 1 for flag in row.flags]
        cells = {
            key: "" if getattr(row, key) is None else form.format(getattr(row, key))
            for _, key, form in COLUMNS
        }
        if row.speedup_interval:
            low, high = row.speedup_interval
            cells["speedup"] += f" ({low:.2f}–{high:.2f})"
        rows.append([name, *cells.values(), " ".join(f"⚑{n}" for n in numbers[name])])
    head = ["method", *(heading for heading, _, _ in COLUMNS), "flags"]
    return Table(f"{one.group.name}: {_answers(one)}", head, rows, notes), numbers


# acceptance


def styles(measured: Sequence[Measured]) -> dict[str, int]:
    """A number for each drafting method, the same in all figures."""
    names = dict.fromkeys(name for one in measured for name in one.drafting)
    return {name: i for i, name in enumerate(names)}


def acceptance(measured: Sequence[Measured], style: dict[str, int]) -> Section:
    """Acceptance by depth, and how far into the draft steps got."""
    section = Section("acceptance", "Acceptance by depth and position", pairs=True)
    if not style:
        section.missing = "No method of these measurements drafts. `drafttrain evaluate` measures one."
        return section
    section.words = [
        "By depth: of the draft tokens that the target judged at that depth, their parent being "
        "accepted, the share that it accepted. By position: the share of all steps whose draft was "
        "accepted at least so far; these shares add up to accept_len − 1, and to a little more where "
        "outputs end within a draft, behind which the target adds no token. "
        f"Hollow points rest on fewer than {FEW} tokens."
    ]
    used: set[str] = set()
    for one in measured:
        depth, position = [], []
        for name in one.drafting:
            stats = one.stats[name]
            if not stats.offered:
                continue
            used.add(name)
            xs = [float(d) for d in range(1, len(stats.offered) + 1)]
            shares = stats.acceptance_by_depth
            reached = [granted / stats.steps for granted in stats.granted]
            pairs = list(zip(stats.granted, stats.offered))
            notes = [f"{name}, depth {d}: {g} of {o} accepted" for d, (g, o) in enumerate(pairs, 1)]
            few = [offered < FEW for offered in stats.offered]
            depth.append(Series(name, style[name], xs, shares, notes, open=few))
            notes = [f"{name}, position {d}: {g} of {stats.steps} steps" for d, (g, _) in enumerate(pairs, 1)]
            position.append(Series(name, style[name], xs, reached, notes, open=few))
        if not depth:
            continue
        deepest = max(len(series.xs) for series in depth)
        frame: dict[str, Any] = {"x_range": (0.7, deepest + 0.3), "y_range": (0.0, 1.0)}
        for kind, series, label in (
            ("by depth", depth, "accepted of those judged"),
            ("by position", position, "steps that accepted so far"),
        ):
            first = "; ".join(f"{s.name}: {' '.join(f'{y:.2f}' for y in s.ys)}" for s in series)
            section.panels.append(
                Chart(
                    f"{one.group.name}: {kind}",
                    first,
                    series,
                    "depth" if kind == "by depth" else "position",
                    label,
                    percent=True,
                    counts=True,
                    **frame,
                )  # fmt: skip
            )
    section.legend = [(number, name, True) for name, number in style.items() if name in used]
    return section


# verified tokens against accept_len


def verify_accept(
    measured: Sequence[Measured], style: dict[str, int], sweeps: dict[str, list[Point]]
) -> Section:
    """γ against τ, of sweeps and of the benchmark's rows."""
    section = Section("verified", "Verified tokens against accept_len (γ–τ)")
    families = dict.fromkeys(point.family for points in sweeps.values() for point in points)
    numbers = {family: len(style) + i if style else i for i, family in enumerate(families)}
    if not style and not sweeps:
        section.missing = (
            "No points. `drafttrain sweep BUNDLE --prompts FILE --trees … --out DIR` makes them; give its "
            "points.jsonl with `--sweep`."
        )
        return section
    section.words = [
        "Each point is one way to draft: draft tokens sent to the target per forward, the root left out "
        "(γ), against tokens emitted per forward, the target's own included (τ). Up and to the left is "
        "better. Lines are Pareto fronts of a family of trees; counts, not times."
    ]
    for name, points in sweeps.items():
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
        section.panels.append(_scatter(f"sweep {name}", series))
    for one in measured:
        series = [
            Series(
                name,
                style[name],
                [row.verify_per_step],
                [row.accept_len],
                [f"{name}: {row.verify_per_step:.2f} verified per step, accept_len {row.accept_len:.3f}"],
                line=False,
            )
            for name in one.drafting
            for row in [one.rows[name]]
        ]
        if series:
            section.panels.append(_scatter(one.group.name, series))
    section.legend = [(number, f"{family} (sweep)", True) for family, number in numbers.items()]
    section.legend += [(number, name, False) for name, number in style.items()]
    if not sweeps:
        section.notes.append(
            "Points of more trees: `drafttrain sweep BUNDLE --prompts FILE --trees … --out DIR`, then "
            "`--sweep DIR/points.jsonl`."
        )
    return section


def _scatter(title: str, series: list[Series]) -> Chart:
    xs = [x for s in series for x in s.xs if x > 0]
    ys = [y for s in series for y in s.ys]
    log = bool(xs) and max(xs) > 8 * min(xs)
    x_range = (min(xs) * 0.85, max(xs) * 1.15) if log else span(xs or [1.0], 0.0)
    if log:
        for s in series:  # what verifies nothing has no place on a logarithmic axis
            kept = [i for i, x in enumerate(s.xs) if x > 0]
            s.xs, s.ys, s.notes = ([row[i] for i in kept] for row in (s.xs, s.ys, s.notes))
            s.front = [point for point in s.front if point[0] > 0]
    words = "; ".join(
        f"{s.name}: {len(s.xs)} points, accept_len up to {max(s.ys):.2f}" for s in series if s.ys
    )
    return Chart(
        title, words, series, "γ: draft tokens per step", "τ: accept_len", x_range, span(ys, 1.0), log
    )
