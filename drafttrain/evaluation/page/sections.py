"""From raw measurements to what the page shows: sections of figures, tables and words. How they look is the
business of `svg.py`, `png.py` and the template."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from drafttrain.calibration.calibration import CONTEXT
from drafttrain.calibration.confidence import BINS
from drafttrain.calibration.timing import Curve
from drafttrain.evaluation.metrics import (
    AUTOREGRESSIVE,
    TRANSFORMERS,
    Measurement,
    Row,
    ratio_interval,
    tabulate,
)
from drafttrain.evaluation.page.panels import Bar, Bars, Chart, Panel, Series, span
from drafttrain.evaluation.page.raw import Benchmark, BundleFiles, Group
from drafttrain.evaluation.sweep import Point, pareto_front
from drafttrain.inference.stats import DecodeStats

FEW = 20  # judged tokens below which a share is drawn hollow
BASELINES = (AUTOREGRESSIVE, TRANSFORMERS)
ALL = "all"


@dataclass
class Table:
    """Numbers in words.

    Attributes:
        title: what the rows are of.
        head: of the columns; the first one names the rows.
        rows: cells as text.
        notes: numbered warnings that cells refer to.
    """

    title: str
    head: list[str]
    rows: list[list[str]]
    notes: list[str] = field(default_factory=list)


@dataclass
class Span:
    """A piece of a text that is colored by iteration.

    Attributes:
        text: of the drafted tokens.
        own: of the target's own token behind them.
        iteration: number of the target forward that brought it; 0 is the prompt's.
        note: about it, in one line.
    """

    text: str
    own: str
    iteration: int
    note: str


@dataclass
class Section:
    """A part of the page.

    Attributes:
        name: for links and for the file names of pictures.
        title: heading.
        words: paragraphs before the figures: what is measured.
        panels: figures of one kind, beside each other.
        pairs: whether every two of them belong together.
        legend: style and name of the series that the panels share, and whether they are lines.
        notes: paragraphs after the figures: what to distrust.
        tables: the numbers.
        quote: what the text answers.
        text: a text, piece by piece.
        missing: instead of all that, which command makes the raw data.
    """

    name: str
    title: str
    words: list[str] = field(default_factory=list)
    panels: list[Panel] = field(default_factory=list)
    pairs: bool = False
    legend: list[tuple[int, str, bool]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    quote: str | None = None
    text: list[Span] = field(default_factory=list)
    missing: str | None = None


@dataclass
class Measured:
    """A group's rows with their intervals.

    Attributes:
        group: the measurements.
        rows: by method, the fastest drafting first, what they are compared with last.
        intervals: 95 % of each speedup; empty without autoregressive decoding.
        stats: counts of the first repeat, by method; None for other engines.
    """

    group: Group
    rows: dict[str, Row]
    intervals: dict[str, list[float]]
    stats: dict[str, DecodeStats | None]

    @classmethod
    def of(cls, group: Group) -> "Measured":
        rows = tabulate(group.measurements)
        order = sorted(rows, key=lambda name: (name in BASELINES, rows[name].seconds))
        intervals = {}
        if group.has_baseline:
            intervals = {m: ratio_interval(group.measurements, AUTOREGRESSIVE, m) for m in order}
        stats = {name: first_counts(group.measurements, name) for name in order}
        return cls(group, {name: rows[name] for name in order}, intervals, stats)

    @property
    def drafting(self) -> list[str]:
        """Methods that draft in our own loop."""
        return [name for name, found in self.stats.items() if found is not None and found.verify_tokens]


@dataclass
class Headline:
    """What the page begins with: one method over all greedy tasks.

    Attributes:
        method: which.
        tuned: whether it was chosen before, on tuning prompts; else it is the fastest of those measured.
        row: its row.
        interval: of its speedup; None without autoregressive decoding.
        of: number of drafting methods that it was chosen from.
        tasks: over which tasks.
    """

    method: str
    tuned: bool
    row: Row
    interval: list[float] | None
    of: int
    tasks: list[str]


def first_counts(measurements: Sequence[Measurement], method: str) -> DecodeStats | None:
    """Sum of a method's statistics over the first repeat of all turns; None if it has none."""
    found = [m.runs[method].stats for m in measurements if m.repeat == 0]
    return None if not found or found[0] is None else sum(found, DecodeStats())


def headline(benchmark: Benchmark, measured: Sequence[Measured]) -> Headline | None:
    """The method to begin with; None if no method drafts on all tasks."""
    chosen = [m for m in measured if not m.group.temperature] or list(measured)
    repeats = {next(iter(m.rows.values())).repeats for m in chosen}
    common = [name for name in chosen[0].rows if all(name in m.rows for m in chosen)]
    drafting = [name for name in common if all(name in m.drafting for m in chosen)]
    if len(repeats) > 1 or not drafting:  # totals over tasks would be of unequal things
        chosen = [max(chosen, key=lambda m: len(m.group.measurements))]
        common, drafting = list(chosen[0].rows), chosen[0].drafting
    if not drafting:
        return None
    everything = [one for m in chosen for one in m.group.only(common)]
    rows = tabulate(everything)
    tuned = benchmark.settings.get("tree") in drafting
    method = benchmark.settings["tree"] if tuned else min(drafting, key=lambda name: rows[name].seconds)
    interval = ratio_interval(everything, AUTOREGRESSIVE, method) if AUTOREGRESSIVE in common else None
    return Headline(method, tuned, rows[method], interval, len(drafting), [m.group.name for m in chosen])


# speed


def speed(measured: Sequence[Measured], best: str | None) -> Section:
    """Bars of speedup by task and method, and all rows."""
    section = Section("speed", "Speedup")
    section.words = [
        "Ratio of total times, prompt encoding included: autoregressive decoding by the same engine in the same "
        "run, divided by the method. Methods take turns prompt by prompt; the time of a turn is the median "
        "over repeats. Whiskers are 95 % bootstrap intervals over chat turns. The mark ▏ right of a bar is "
        "accept_len, tokens emitted per target forward: no speedup can pass it unless the baseline was slowed by "
        "something, and what lies between is the cost of drafting and verifying."
    ]
    for one in measured:
        table, numbers = rows_table(one)
        section.tables.append(table)
        if not one.group.has_baseline:
            section.notes.append(
                f"{one.group.name}: autoregressive decoding was not measured with these methods, so there is no "
                "speedup."
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
    row, (low, high) = one.rows[name], one.intervals[name]
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
    ("without repeats", "accept_len_fresh", "{:.2f}"),
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
        if name in one.intervals:
            low, high = one.intervals[name]
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
        "By depth: of the draft tokens that the target judged at that depth, their parent being accepted, the "
        "share that it accepted. By position: the share of all steps whose draft was accepted at least so far; "
        f"these shares add up to accept_len − 1 (less what the ends of outputs cut off). Hollow points rest on fewer than {FEW} tokens."
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
        "(γ), against tokens emitted per forward, the target's own included (τ). Up and to the left is better. "
        "Lines are Pareto fronts of a family of trees; counts, not times."
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


# calibration


def reliability(bundles: Sequence[BundleFiles]) -> Section:
    """Confidence against acceptance, of drafters and classifiers."""
    section = Section("reliability", "Is confidence worth its name?")
    for bundle in bundles:
        if bundle.calibration is not None:
            kinds = bundle.calibration.confidence
            series = []
            for number, kind in enumerate(kind for kind in ("raw", "scaled") if kind in kinds):
                row = kinds[kind]["all"]
                temperature = 1.0 if kind == "raw" else bundle.calibration.temperature
                label = f"temperature {temperature:g}: ECE {row.ece:.3f}"
                series.append(_reliability_series(label, number, row.bins))
            if series:
                tokens = kinds["raw"]["all"].tokens
                section.panels.append(_reliability_chart(f"{bundle.name}: drafter, {tokens} tokens", series))
        if bundle.classifier is not None:
            rows = bundle.classifier["rows"]
            series = [
                _reliability_series(f"{name}: ECE {row['all']['ece']:.4f}", number, row["all"]["bins"])
                for number, (name, row) in enumerate(rows.items())
            ]
            section.panels.append(_reliability_chart(f"{bundle.name}: classifier, validation trees", series))
    if not section.panels:
        section.missing = (
            "No calibration. `drafttrain calibrate BUNDLE --prompts FILE` makes it (and `drafttrain "
            "train-classifier` the classifier's report); give the folder with `--bundle`."
        )
        return section
    section.words = [
        f"Draft tokens in {BINS} bins by confidence: mean confidence against the share that the target accepted. "
        "On the dashed line confidence is a probability; above it drafts are accepted more often than it says. Judged are "
        "tokens whose parents were accepted; a classifier's nodes are those of whole trees. ECE is the mean "
        "distance from the line, weighted by tokens; hollow points rest on few."
    ]
    return section


def _reliability_series(name: str, number: int, bins: Sequence[Sequence[float | None]]) -> Series:
    filled = [(n, mean, share) for n, mean, share in bins if n]
    notes = [
        f"{name}: {n:g} tokens, confidence {mean:.3f}, accepted {share:.3f}" for n, mean, share in filled
    ]
    few = [n < FEW for n, _, _ in filled]
    return Series(name, number, [mean for _, mean, _ in filled], [s for _, _, s in filled], notes, open=few)


def _reliability_chart(title: str, series: list[Series]) -> Chart:
    words = "; ".join(s.name for s in series)
    frame: dict[str, Any] = {"x_range": (0.0, 1.0), "y_range": (0.0, 1.0), "diagonal": True, "percent": True}
    return Chart(title, words, series, "confidence", "accepted", legend=True, **frame)


def costs(bundles: Sequence[BundleFiles], points: dict[str, list[tuple[str, float]]]) -> Section:
    """Curves of verification and drafting times.

    Args:
        points: of each bundle, operating points: a name and tokens verified per step, root included.
    """
    section = Section("costs", "What verifying and drafting cost", pairs=True)
    for bundle in bundles:
        if (found := bundle.calibration) is None:
            continue
        here = found.machine
        where = f"{found.dtype}, {here.get('threads')} threads of {here.get('processor')}"
        if here.get("gpu"):
            where = f"{found.dtype}, {here['gpu']}"
        for kind, curves, label in (
            ("the target's forward", found.target, "tokens verified (the root included)"),
            ("a drafting step", found.drafter, "nodes expanded"),
        ):
            series = [_cost_series(i, curve) for i, curve in enumerate(curves)]
            most = max(size for curve in curves for size in curve.sizes)
            high = max(s for curve in curves for s in curve.upper)
            marks = points.get(bundle.name, []) if curves is found.target else []
            words = "; ".join(
                f"{s.name}: {s.ys[0]:.1f} ms for {s.xs[0]:g}, {s.ys[-1]:.1f} ms for {s.xs[-1]:g}"
                for s in series
            )
            lines = [(tokens, f"{tokens:.1f} tokens") for _, tokens in marks]
            section.panels.append(
                Chart(
                    f"{bundle.name}: {kind}",
                    words,
                    series,
                    label,
                    "ms",
                    (1.0, float(most)),
                    span([1000 * high], 0.0),
                    log_x=True,
                    marks=lines,
                )  # fmt: skip
            )
            if not section.legend:
                section.legend = [(s.style, s.name, True) for s in series]
        section.words.append(f"{bundle.name} was timed with {where}: medians, quartiles as bands.")
        costs_of_target = min(found.target, key=lambda curve: abs(curve.context - CONTEXT)).cost()
        for name, tokens in points.get(bundle.name, []):
            taken, one = costs_of_target(tokens), costs_of_target(1)
            section.words.append(
                f"The line marks the operating point of {name}: {tokens:.1f} tokens per step on average, which "
                f"take {1000 * taken:.1f} ms, {taken / one:.2f} times as long as one token does ({1000 * one:.1f} "
                "ms)."
            )
    if not section.panels:
        section.missing = (
            "No cost curves. `drafttrain calibrate BUNDLE --prompts FILE` measures them; give the folder with "
            "`--bundle`."
        )
    return section


def _cost_series(number: int, curve: Curve) -> Series:
    low, middle, high = ([1000 * s for s in row] for row in (curve.lower, curve.median, curve.upper))
    notes = [f"{curve.context} tokens of context, {n}: {ms:.2f} ms" for n, ms in zip(curve.sizes, middle)]
    xs = [float(size) for size in curve.sizes]
    name = f"{curve.context} tokens of context"
    return Series(name, number, xs, middle, notes, low=low, high=high, small=True)


def operating_points(
    bundles: Sequence[BundleFiles], found: Headline | None
) -> dict[str, list[tuple[str, float]]]:
    """For each bundle the tree that was chosen for it and its mean tokens per step, root included: as its own
    evaluation says, or else the benchmark's first method."""
    points = {}
    for bundle in bundles:
        tasks = (bundle.evaluation or {}).get("tasks", {})
        rows = [tasks[ALL]] if ALL in tasks else list(tasks.values())
        steps = sum(row["steps"] for row in rows)
        if steps:
            tokens = 1 + sum(row["verify_tokens"] for row in rows) / steps
            points[bundle.name] = [(bundle.evaluation["tree"], tokens)]
        elif found is not None and found.row.verify_per_step is not None:
            points[bundle.name] = [(found.method, 1 + found.row.verify_per_step)]
    return points


def training(bundles: Sequence[BundleFiles]) -> Section:
    """Loss and accept_len over the steps of training."""
    section = Section("training", "Training", pairs=True)
    for bundle in bundles:
        entries = bundle.log or []
        losses = _curve("loss (training)", 0, entries, "loss", small=True)
        held_out = _curve("loss (held-out)", 1, entries, "eval_loss")
        series = [s for s in (losses, held_out) if s.xs]
        if series:
            ys = sorted(y for s in series for y in s.ys)
            top = ys[int(0.98 * (len(ys) - 1))]  # the first steps would flatten the rest
            section.panels.append(_training_chart(f"{bundle.name}: loss", series, "loss", span([ys[0], top])))
            section.legend = [(s.style, s.name, True) for s in series]
        lengths = _curve("accept_len (held-out)", 2, entries, "eval_accept_len")
        fresh = _curve("without repeats", 3, entries, "eval_accept_len_fresh")
        series = [s for s in (lengths, fresh) if s.xs]
        if series:
            ys = [y for s in series for y in s.ys]
            chart = _training_chart(f"{bundle.name}: accept_len", series, "tokens per forward", span(ys))
            section.panels.append(chart)
            section.legend += [(s.style, s.name, True) for s in series]
    if not section.panels:
        section.missing = (
            "No training log. `drafttrain train RECIPE` writes it and `drafttrain export RECIPE` bundles it; give "
            "the folder with `--bundle`."
        )
        return section
    section.legend = list(dict.fromkeys(section.legend))
    section.words = [
        "Training loss is the mean since the point before. accept_len was measured by decoding held-out prompts, "
        "not by teacher forcing. The highest losses of the first steps may lie above the frame."
    ]
    return section


def _curve(name: str, style: int, entries: Sequence[dict[str, Any]], key: str, small: bool = False) -> Series:
    found = [entry for entry in entries if key in entry and "step" in entry]
    notes = []
    for entry in found:
        minutes = f", {entry['elapsed'] / 60:.0f} minutes" if "elapsed" in entry else ""
        notes.append(f"{name} {entry[key]:.3f} at step {entry['step']}{minutes}")
    xs, ys = [float(entry["step"]) for entry in found], [float(entry[key]) for entry in found]
    return Series(name, style, xs, ys, notes, small=small)


def _training_chart(title: str, series: list[Series], label: str, y_range: tuple[float, float]) -> Chart:
    words = "; ".join(f"{s.name} from {s.ys[0]:.2f} to {s.ys[-1]:.2f}" for s in series)
    last = max(x for s in series for x in s.xs)
    return Chart(title, words, series, "step", label, (0.0, last * 1.02), y_range)
