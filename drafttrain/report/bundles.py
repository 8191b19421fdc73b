"""The sections that bundles give: confidence, costs, training."""

import math
from collections.abc import Sequence
from typing import Any

from drafttrain.calibration.calibration import BINS, CONTEXT, Curve
from drafttrain.report.panels import Chart, Series, span
from drafttrain.report.raw import BundleFiles
from drafttrain.report.rows import Headline
from drafttrain.report.sections import FEW, Section

ALL = "all"  # the row of eval.json over all tasks
CURVES = ("loss", "eval_loss", "eval_accept_len", "eval_accept_len_nonrepeated")  # of the training log


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
        f"Draft tokens in {BINS} bins by confidence: mean confidence against the share that the target "
        "accepted. On the dashed line confidence is a probability; above it drafts are accepted more "
        "often than it says. Judged are tokens whose parents were accepted; a classifier's nodes are "
        "those of whole trees. ECE is the mean distance from the line, weighted by tokens; hollow points "
        "rest on few."
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
        verify = min(found.target, key=lambda curve: abs(curve.context - CONTEXT)).cost()
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
            lines = [(tokens, f"{tokens:.1f} tokens, {1000 * verify(tokens):.1f} ms") for _, tokens in marks]
            last = max([float(most), *(tokens for _, tokens in marks)])
            section.panels.append(
                Chart(
                    f"{bundle.name}: {kind}",
                    words,
                    series,
                    label,
                    "ms",
                    (1.0, last),
                    span([1000 * high], 0.0),
                    log_x=True,
                    marks=lines,
                )  # fmt: skip
            )
            if not section.legend:
                section.legend = [(s.style, s.name, True) for s in series]
        section.words.append(f"{bundle.name} was timed with {where}: medians, quartiles as bands.")
        for name, tokens in points.get(bundle.name, []):
            taken, one, timed = verify(tokens), verify(1), max(verify.sizes)
            beyond = f", by extrapolation from {timed}" if tokens > timed else ""
            section.words.append(
                f"The line marks the operating point of {name}: {tokens:.1f} tokens per step on average, "
                f"which take {1000 * taken:.1f} ms{beyond}, {taken / one:.2f} times as long as one token "
                f"does ({1000 * one:.1f} ms)."
            )
    if not section.panels:
        section.missing = (
            "No cost curves. `drafttrain calibrate BUNDLE --prompts FILE` measures them; give the folder "
            "with `--bundle`."
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
            section.legend += [(s.style, s.name, True) for s in series]
        lengths = _curve("accept_len (held-out)", 2, entries, "eval_accept_len")
        fresh = _curve("without repeats", 3, entries, "eval_accept_len_nonrepeated")
        series = [s for s in (lengths, fresh) if s.xs]
        if series:
            ys = [y for s in series for y in s.ys]
            chart = _training_chart(f"{bundle.name}: accept_len", series, "tokens per forward", span(ys))
            section.panels.append(chart)
            section.legend += [(s.style, s.name, True) for s in series]
        if bad := sum(key in entry and not _is_number(entry[key]) for entry in entries for key in CURVES):
            section.notes.append(
                f"{bundle.name}: {bad} values of the training log are no numbers (a loss that diverged is "
                "NaN) and are not drawn."
            )
    if not section.panels:
        section.missing = (
            "No training log. `drafttrain train RECIPE` writes it and `drafttrain export RECIPE` bundles "
            "it; give the folder with `--bundle`."
        )
        return section
    section.legend = list(dict.fromkeys(section.legend))
    section.words = [
        "Training loss is the mean since the point before. accept_len was measured by decoding held-out "
        "prompts, not by teacher forcing. The highest losses of the first steps may lie above the frame."
    ]
    return section


def _curve(name: str, style: int, entries: Sequence[dict[str, Any]], key: str, small: bool = False) -> Series:
    found = [entry for entry in entries if _is_number(entry.get(key)) and _is_number(entry.get("step"))]
    notes = []
    for entry in found:
        minutes = f", {entry['elapsed'] / 60:.0f} minutes" if "elapsed" in entry else ""
        notes.append(f"{name} {entry[key]:.3f} at step {entry['step']}{minutes}")
    xs, ys = [float(entry["step"]) for entry in found], [float(entry[key]) for entry in found]
    return Series(name, style, xs, ys, notes, small=small)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _training_chart(title: str, series: list[Series], label: str, y_range: tuple[float, float]) -> Chart:
    words = "; ".join(f"{s.name} from {s.ys[0]:.2f} to {s.ys[-1]:.2f}" for s in series)
    last = max(x for s in series for x in s.xs)
    return Chart(title, words, series, "step", label, (0.0, last * 1.02), y_range)
