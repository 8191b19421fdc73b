"""Read and check the raw files that a page is made from; nothing else goes into it."""

import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from drafttrain.bundle import find_bundle
from drafttrain.bundle_files import EVALUATION, LOG
from drafttrain.calibration.calibration import FILE as CALIBRATION
from drafttrain.calibration.calibration import Calibration
from drafttrain.classifier.train import REPORT as CLASSIFIER_REPORT
from drafttrain.evaluation.metrics import AUTOREGRESSIVE, BASELINES, Measurement, Row, tabulate
from drafttrain.evaluation.sweep import Point
from drafttrain.inference.stats import DecodeStats
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json, require_file, usable
from drafttrain.utils.hashes import sha256_file
from drafttrain.utils.types import check_types, fits

MEASUREMENTS = ("measurements.jsonl", "measurements.jsonl.gz")
EVALUATION_VERSION = 2  # format of summary.json and eval.json that is read here
SETTINGS = {"benchmark.json": 1, "summary.json": EVALUATION_VERSION}
BUNDLE_FILES = (CALIBRATION, LOG, EVALUATION, CLASSIFIER_REPORT)
TUNING = "(tuning)"  # the task whose prompts only chose settings
MEASURE = "measure with drafttrain benchmark"
SWEEP = "make it with drafttrain benchmark --table sweep"


@dataclass
class Group:
    """Measurements that belong in one table: the same prompts, temperature and methods.

    Attributes:
        task: name of the prompt set.
        temperature: 0 is greedy.
        measurements: the same number of repeats of every turn.
    """

    task: str
    temperature: float
    measurements: list[Measurement]

    @property
    def name(self) -> str:
        """Return the task's name, with the temperature where texts are sampled."""
        return self.task if not self.temperature else f"{self.task}, temperature {self.temperature:g}"

    @property
    def has_baseline(self) -> bool:
        """Return whether autoregressive decoding was measured with the other methods."""
        return AUTOREGRESSIVE in self.measurements[0].runs

    @cached_property
    def rows(self) -> dict[str, Row]:
        """Return the reported numbers by method, the fastest drafting first, the baselines last."""
        rows = tabulate(self.measurements)
        order = sorted(rows, key=lambda name: (name in BASELINES, -rows[name].tokens_per_second))
        return {name: rows[name] for name in order}

    @cached_property
    def stats(self) -> dict[str, DecodeStats | None]:
        """Return the counts of the first repeat by method; None for other engines."""
        first = [m for m in self.measurements if m.repeat == 0]
        runs = {name: [m.runs[name].stats for m in first] for name in self.rows}
        return {name: None if None in stats else sum(stats, DecodeStats()) for name, stats in runs.items()}

    @property
    def drafting(self) -> list[str]:
        """Return the methods that draft in our own loop."""
        return [name for name, stats in self.stats.items() if stats is not None and stats.verify_tokens]

    @property
    def answers(self) -> str:
        """Return the number of answers and repeats, in words."""
        row = next(iter(self.rows.values()))
        repeats = f", {row.repeats} repeats" if row.repeats > 1 else ""
        return f"{row.prompts} answer{'s' if row.prompts > 1 else ''}{repeats}"

    def only(self, methods: Sequence[str]) -> list[Measurement]:
        """Return the measurements with only the runs of these methods."""
        return [replace(m, runs={name: m.runs[name] for name in methods}) for m in self.measurements]


@dataclass
class Benchmark:
    """A folder of measurements.

    Attributes:
        name: of the folder.
        groups: in order of first appearance, tuning prompts left out.
        settings: of benchmark.json or summary.json; empty where there is neither.
        unfinished: measurements left out because they were cut off, or other turns lack that repeat.
        files: the files read.
    """

    name: str
    groups: list[Group]
    settings: dict[str, Any]
    unfinished: int
    files: list[Path]


@dataclass
class BundleFiles:
    """The files of a bundle that the page shows; None for those that are missing."""

    name: str
    calibration: Calibration | None
    log: list[dict[str, Any]] | None
    evaluation: dict[str, Any] | None
    classifier: dict[str, Any] | None
    files: list[Path]


def read_benchmark(path: str | os.PathLike) -> Benchmark:
    """Read a folder with `measurements.jsonl` (or `.jsonl.gz`), or such a file of any name NAME.jsonl, whose
    settings are in NAME_summary.json.

    A last line that a kill cut off is left out, and so are measurements of a repeat that is not finished.

    Raises:
        UserError: nothing there, unreadable, or of another format.
    """
    path = Path(path)
    if not path.exists():
        raise UserError(f"{path}: no such folder; {MEASURE}")
    file = next((path / name for name in MEASUREMENTS if (path / name).exists()), path)
    if file.is_dir():
        raise UserError(f"{path}: no {MEASUREMENTS[0]} there; {MEASURE}")
    settings, files = {}, [file]
    alone = {f"{_stem(file)}_summary.json": EVALUATION_VERSION}
    for name, version in (SETTINGS if file.name in MEASUREMENTS else alone).items():
        if (place := file.parent / name).exists():
            settings = read_json(place)
            if not isinstance(settings, dict) or settings.get("format_version") != version:
                raise UserError(f"{place}: not of format {version}, which this version reads; {MEASURE}")
            files.append(place)
            break
    by_key: dict[tuple, list[Measurement]] = {}
    measurements, is_cut = _measurements(file)
    for m in measurements:
        by_key.setdefault((m.task, m.temperature, frozenset(m.runs)), []).append(m)
    groups, unfinished = [], int(is_cut)
    for (task, temperature, _), part in by_key.items():
        if task != TUNING:
            whole = whole_repeats(part)
            unfinished += len(part) - len(whole)
            if whole:
                groups.append(Group(task, temperature, whole))
    if not groups:
        raise UserError(f"{file}: holds no measurements of a benchmark; {MEASURE}")
    name = path.resolve().name if path.is_dir() else _stem(path)
    return Benchmark(name, groups, settings, unfinished, files)


def _stem(file: Path) -> str:
    """Return the NAME of NAME.jsonl or NAME.jsonl.gz."""
    return file.name.removesuffix(".gz").removesuffix(".jsonl")


def _measurements(file: Path) -> tuple[list[Measurement], bool]:
    """Return all measurements of a log, and whether a kill cut off its last line."""
    require_file(file)
    with usable(file, MEASURE):
        data = file.read_bytes()
        try:
            head, *lines, last = (gzip.decompress(data) if file.suffix == ".gz" else data).split(b"\n")
        except (EOFError, zlib.error) as error:  # cut off
            raise ValueError(str(error)) from None
    with usable(f"{file}: line 1", MEASURE):
        if set(json.loads(head)) != {"measured"}:
            raise ValueError("no log of measurements")
    measurements = []
    for number, line in enumerate(lines, 2):
        with usable(f"{file}: line {number}", MEASURE):
            measurements.append(Measurement.from_json(json.loads(line)))
            runs = measurements[-1].runs.values()
            if not runs or not all(run.seconds > 0 and run.token_ids for run in runs):
                raise ValueError("a run without time or tokens")
    counts = Counter(m.key for m in measurements)
    if twice := [key for key, n in counts.items() if n > 1]:
        task, prompt, turn, repeat, *_ = twice[0]
        raise UserError(
            f"{file}: must have each measurement once, got two of {task}, prompt {prompt}, turn {turn}, "
            f"repeat {repeat}; two processes have written it, measure again"
        )
    return measurements, bool(last.strip())


def whole_repeats(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return as many measurements as possible with the same number of repeats of every turn. Turns without
    the first repeat, whose tokens and counts are those that are reported, are left out."""
    begun = {(m.prompt, m.turn) for m in measurements if m.repeat == 0}
    counts = Counter(turn for m in measurements if (turn := (m.prompt, m.turn)) in begun)
    repeats = range(1, max(counts.values(), default=0) + 1)
    best = max(repeats, key=lambda n: n * sum(c >= n for c in counts.values()), default=0)
    seen: Counter = Counter()
    whole = []
    for m in sorted(measurements, key=lambda m: m.repeat):  # counts come from the first
        turn = (m.prompt, m.turn)
        if turn in begun and counts[turn] >= best and seen[turn] < best:
            seen[turn] += 1
            whole.append(m)
    return whole


def read_bundle(path: str | os.PathLike) -> BundleFiles:
    """Read the JSON files of a bundle, or of any folder with some of them.

    Args:
        path: folder or Hub id.

    Raises:
        UserError: no such folder, none of the files in it, or one that cannot be used.
    """
    folder = Path(path)
    if not folder.is_dir():
        folder = find_bundle(path)
    files = [folder / name for name in BUNDLE_FILES if (folder / name).exists()]
    if not files:
        raise UserError(f"{folder}: none of {', '.join(BUNDLE_FILES)} there; give the folder of an export")
    values = {file.name: read_json(file) for file in files if file.name != CALIBRATION}
    log, evaluation, classifier = map(values.get, (LOG, EVALUATION, CLASSIFIER_REPORT))
    if log is not None and not (isinstance(log, list) and all(isinstance(entry, dict) for entry in log)):
        raise UserError(f"{folder / LOG}: no list of entries; train again, or delete it")
    if classifier is not None:
        with usable(folder / CLASSIFIER_REPORT, "train again with drafttrain c2t"):
            for row in classifier["rows"].values():
                float(row["all"]["ece"]) + sum(n + 0 for n, _, _ in row["all"]["bins"])
            for curve in classifier.get("curves", {}).values():
                sum(curve["theta"]) + sum(curve["recall"]) + curve["theta"][0]
    if evaluation is not None:
        if not isinstance(evaluation, dict) or evaluation.get("format_version") != EVALUATION_VERSION:
            raise UserError(
                f"{folder / EVALUATION}: not of format {EVALUATION_VERSION}; evaluate the bundle again"
            )
        with usable(folder / EVALUATION, "evaluate the bundle again"):
            for row in evaluation.get("tasks", {}).values():
                counts = [row["steps"], row["verify_tokens"]]
                if not fits(counts, list[float]) or min(counts) < 0 or not fits(evaluation["tree"], str):
                    raise ValueError("a count or the tree is of the wrong type")
    calibration = Calibration.load(folder) if folder / CALIBRATION in files else None
    name = Path(path).name or folder.resolve().name
    return BundleFiles(name, calibration, log, evaluation, classifier, files)


def points_file(path: str | os.PathLike) -> Path:
    """Return `points.jsonl` of a sweep, given by itself or by its folder."""
    return Path(path) / "points.jsonl" if Path(path).is_dir() else Path(path)


def read_points(path: Path) -> list[Point]:
    """Read `points.jsonl` of a sweep.

    Raises:
        UserError: missing or damaged.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file; {SWEEP}")
    require_file(path)
    with usable(path, SWEEP):
        points = [Point(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
        if not points:
            raise ValueError("no points in it")
        for point in points:
            check_types(point)
    return points


def source(path: Path) -> tuple[str, str]:
    """Return name and first hex digits of the hash of a raw file, for the page's last lines."""
    return f"{path.parent.name}/{path.name}", sha256_file(path)[:12]
