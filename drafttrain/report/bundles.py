"""The sections from bundles: confidence, costs, training."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from drafttrain.calibration.calibration import CONTEXT, Calibration, Curve
from drafttrain.evaluation.config import ALL
from drafttrain.report.measured import Headline
from drafttrain.report.panels import FEW, Chart, Section, Series, span
from drafttrain.report.raw import BundleFiles

CURVES = ("loss", "eval_loss", "eval_accept_len")  # of the training log; others may have no value


def reliability(bundles: Sequence[BundleFiles]) -> Section:
    """Return confidence against acceptance, of drafters and classifiers."""
    section = Section("reliability")
    for bundle in bundles:
        if bundle.calibration is not None:
            section.panels += _drafter_panels(bundle.name, bundle.calibration)
        if bundle.classifier is not None:
            section.panels += classifier_panels(bundle.name, bundle.classifier)
    return section


def _drafter_panels(bundle: str, calibration: Calibration) -> list[Chart]:
    """Return confidence against acceptance, and both errors and acceptance by depth."""
    temperatures = {"raw": 1.0, "scaled": calibration.temperature}
    kinds = {kind: rows for kind, rows in calibration.confidence.items() if kind in temperatures}
    bins = [
        (f"temperature {temperatures[kind]:g}: ECE {rows['all'].ece:.3f}", rows["all"].bins)
        for kind, rows in kinds.items()
    ]
    charts = [_reliability(f"{bundle}: drafter, {kinds['raw']['all'].tokens} tokens", bins)]
    depths = [depth for depth in kinds["raw"] if depth != "all"]
    lines = [("accepted", [kinds["raw"][depth].accepted for depth in depths])]
    for kind, rows in kinds.items():
        name = f"ECE at temperature {temperatures[kind]:g}"
        # scaled values are of temperatures fitted to each half of the drafts, so they differ at 1 as well
        name += ", scaled" if kind == "scaled" and temperatures[kind] == 1 else ""
        lines.append((name, [rows[depth].ece for depth in depths]))
    xs, few = [float(depth) for depth in depths], [kinds["raw"][depth].tokens < FEW for depth in depths]
    series = [
        Series(name, i, xs, ys, [f"{name}, depth {d}: {y:.3f}" for d, y in zip(depths, ys)], open=few)
        for i, (name, ys) in enumerate(lines)
    ]
    if depths:
        frame = (0.7, float(depths[-1]) + 0.3), (0.0, 1.0)
        charts.append(Chart(f"{bundle}: drafter, by depth", series, "depth", "share", *frame))
        charts[-1].counts = charts[-1].legend = True
    return charts


def classifier_panels(bundle: str, report: dict[str, Any]) -> list[Chart]:
    """Return confidence against acceptance, and the recall of accepted nodes by share of nodes kept."""
    rows = {name: row["all"] for name, row in report["rows"].items()}
    bins = [(f"{name}: ECE {row['ece']:.4f}", row["bins"]) for name, row in rows.items()]
    charts = [_reliability(f"{bundle}: classifier, validation trees", bins)]
    series = [
        Series(name, i, curve["theta"], curve["recall"], notes=[])
        for i, (name, curve) in enumerate(report.get("curves", {}).items())
    ]
    if series:
        frame = (min(s.xs[0] for s in series), 1.0), (0.0, 1.0)
        chart = Chart(
            f"{bundle}: classifier, recall", series, "positive rate θ", "recall", *frame, log_x=True
        )
        chart.percent = chart.legend = True
        charts.append(chart)
    return charts


def _reliability(title: str, kinds: Sequence[tuple[str, Sequence[Sequence[float | None]]]]) -> Chart:
    """Return a chart of named bins: number of tokens, mean confidence, share accepted."""
    series = []
    for number, (name, bins) in enumerate(kinds):
        filled = [(n, mean, share) for n, mean, share in bins if n]
        notes = [
            f"{name}: {n:g} tokens, confidence {mean:.3f}, accepted {share:.3f}" for n, mean, share in filled
        ]
        few = [n < FEW for n, _, _ in filled]
        _, xs, ys = map(list, zip(*filled)) if filled else ([], [], [])
        series.append(Series(name, number, xs, ys, notes, open=few))
    chart = Chart(title, series, "confidence", "accepted", (0.0, 1.0), (0.0, 1.0))
    chart.diagonal = chart.percent = chart.legend = True
    return chart


def costs(bundles: Sequence[BundleFiles], points: dict[str, tuple[str, float]]) -> Section:
    """Return curves of verification and drafting times.

    Args:
        points: of each bundle, the operating point: a name and tokens verified per step, root included.
    """
    section = Section("costs", pairs=True)
    calibrations = [bundle.calibration for bundle in bundles if bundle.calibration is not None]
    contexts = sorted({curve.context for one in calibrations for curve in (*one.target, *one.drafter)})
    styles = {context: number for number, context in enumerate(contexts)}
    section.legend = [(_context(context), number, True) for context, number in styles.items()]
    for bundle in bundles:
        if (calibration := bundle.calibration) is None:
            continue
        machine = calibration.machine
        where = machine.get("gpu") or f"{machine.get('threads')} threads of {machine.get('processor')}"
        section.words.append(
            f"{bundle.name} was timed in {calibration.dtype} on {where}: medians, quartiles as bands."
        )
        marks = []
        if bundle.name in points:
            name, tokens = points[bundle.name]
            words, mark = _operating_point(calibration, name, tokens)
            section.words.append(words)
            marks.append((tokens, mark))
        verifying = f"{bundle.name}: the target's forward", "tokens verified (the root included)"
        drafting = f"{bundle.name}: a drafting step", "nodes expanded"
        section.panels.append(_cost_chart(*verifying, calibration.target, styles, marks))
        section.panels.append(_cost_chart(*drafting, calibration.drafter, styles, []))
    return section


def _operating_point(calibration: Calibration, name: str, tokens: float) -> tuple[str, str]:
    """Return the time to verify some tokens, as a sentence and as the label of a mark."""
    verify = min(calibration.target, key=lambda curve: abs(curve.context - CONTEXT)).cost()
    ms, single, timed = 1000 * verify(tokens), 1000 * verify(1), max(verify.sizes)
    beyond = f", by extrapolation from {timed}" if tokens > timed else ""
    sentence = (
        f"The line marks the operating point of {name}: {tokens:.1f} tokens per step on average, which take "
        f"{ms:.1f} ms{beyond}, {ms / single:.2f} times as long as one token ({single:.1f} ms)."
    )
    return sentence, f"{tokens:.1f} tokens, {ms:.1f} ms"


def _context(tokens: int) -> str:
    return f"{tokens} tokens of context"


def _cost_chart(
    title: str,
    label: str,
    curves: Sequence[Curve],
    styles: Mapping[int, int],
    marks: list[tuple[float, str]],
) -> Chart:
    """Return a chart of times by size, a line for each context in its style."""
    series = []
    for curve in curves:
        name, xs = _context(curve.context), [float(size) for size in curve.sizes]
        low, middle, high = ([1000 * s for s in row] for row in (curve.lower, curve.median, curve.upper))
        notes = [f"{name}, {n}: {ms:.2f} ms" for n, ms in zip(curve.sizes, middle)]
        series.append(Series(name, styles[curve.context], xs, middle, notes, low=low, high=high, small=True))
    last = max([x for s in series for x in s.xs] + [tokens for tokens, _ in marks])
    y_range = span([y for s in series for y in s.high], 0.0)
    return Chart(title, series, label, "ms", (1.0, last), y_range, log_x=True, marks=marks)


def operating_points(bundles: Sequence[BundleFiles], head: Headline | None) -> dict[str, tuple[str, float]]:
    """Return for each bundle the tree that was chosen for it and its mean tokens per step, root included:
    from its own evaluation, or else from the headline method of the benchmark."""
    points = {}
    for bundle in bundles:
        tasks = (bundle.evaluation or {}).get("tasks", {})
        rows = [tasks[ALL]] if ALL in tasks else list(tasks.values())
        if steps := sum(row["steps"] for row in rows):
            tokens = 1 + sum(row["verify_tokens"] for row in rows) / steps
            points[bundle.name] = bundle.evaluation["tree"], tokens
        elif head is not None and head.row.verify_per_step is not None:
            points[bundle.name] = head.method, 1 + head.row.verify_per_step
    return points


def training(bundles: Sequence[BundleFiles]) -> Section:
    """Return loss and accept_len over the steps of training."""
    section = Section("training", pairs=True)
    for bundle in bundles:
        entries = bundle.log or []
        losses = _curve("loss (training)", 0, entries, "loss", small=True)
        held_out = _curve("loss (held-out)", 1, entries, "eval_loss")
        lengths = _curve("accept_len (held-out)", 2, entries, "eval_accept_len")
        alone = _curve("without repeats", 3, entries, "eval_accept_len_nonrepeated")
        for title, label, curves in (
            ("loss", "loss", [losses, held_out]),
            ("accept_len", "tokens per forward", [lengths, alone]),
        ):
            if series := [s for s in curves if s.xs]:
                ys = sorted(y for s in series for y in s.ys)
                if title == "loss":
                    ys = ys[: int(0.98 * (len(ys) - 1)) + 1]  # the first steps would flatten the rest
                ends = (0.0, max(x for s in series for x in s.xs) * 1.02), span(ys)
                section.panels.append(Chart(f"{bundle.name}: {title}", series, "step", label, *ends))
                section.legend += [(s.name, s.style, True) for s in series]
        if bad := sum(key in entry and not _is_number(entry[key]) for entry in entries for key in CURVES):
            section.notes.append(
                f"{bundle.name}: {bad} values of the training log are no numbers (a loss that diverged is "
                "NaN) and are not drawn."
            )
    section.legend = list(dict.fromkeys(section.legend))
    return section


def _curve(name: str, style: int, entries: Sequence[dict[str, Any]], key: str, small: bool = False) -> Series:
    rows = [entry for entry in entries if _is_number(entry.get(key)) and _is_number(entry.get("step"))]
    notes = []
    for row in rows:
        minutes = f", {row['elapsed'] / 60:.0f} minutes" if _is_number(row.get("elapsed")) else ""
        notes.append(f"{name} {row[key]:.3f} at step {row['step']}{minutes}")
    xs, ys = [float(row["step"]) for row in rows], [float(row[key]) for row in rows]
    return Series(name, style, xs, ys, notes, small=small)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
