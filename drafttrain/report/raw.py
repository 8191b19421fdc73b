"""The raw files that a page is made from, read and checked. Nothing else goes into it."""

import gzip
import json
import os
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from drafttrain.bundle import find_bundle
from drafttrain.bundle_files import EVALUATION
from drafttrain.calibration.calibration import FILE as CALIBRATION
from drafttrain.calibration.calibration import Calibration
from drafttrain.classifier.train import REPORT as CLASSIFIER_REPORT
from drafttrain.evaluation.metrics import AUTOREGRESSIVE, Measurement
from drafttrain.evaluation.sweep import Point
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json, sha256_file

MEASUREMENTS = ("measurements.jsonl", "measurements.jsonl.gz")
EVALUATION_VERSION = 2  # format of summary.json and eval.json that is read here
SETTINGS = {"benchmark.json": 1, "summary.json": EVALUATION_VERSION}
TRAINING_LOG = "training_log.json"
BUNDLE_FILES = (CALIBRATION, TRAINING_LOG, EVALUATION, CLASSIFIER_REPORT)
TUNING = "(tuning)"  # the task whose prompts only chose settings
MEASURE = "measure with drafttrain benchmark"


@dataclass
class Group:
    """Measurements that belong in one table: the same prompts, temperature and methods.

    Attributes:
        task: name of the prompt set.
        temperature: 0 is greedy.
        measurements: as many repeats of every turn.
    """

    task: str
    temperature: float
    measurements: list[Measurement]

    @property
    def name(self) -> str:
        return self.task if not self.temperature else f"{self.task}, temperature {self.temperature:g}"

    @property
    def methods(self) -> list[str]:
        return list(self.measurements[0].runs)

    @property
    def has_baseline(self) -> bool:
        return AUTOREGRESSIVE in self.measurements[0].runs

    def only(self, methods: Sequence[str]) -> list[Measurement]:
        """The measurements with the runs of these methods alone."""
        return [replace(m, runs={name: m.runs[name] for name in methods}) for m in self.measurements]


@dataclass
class Benchmark:
    """A folder of measurements.

    Attributes:
        name: of the folder.
        groups: in order of first appearance, tuning prompts left out.
        settings: of benchmark.json or summary.json; empty where there is neither.
        unfinished: measurements left out because they were cut off, or other turns lack that repeat.
        files: what was read.
    """

    name: str
    groups: list[Group]
    settings: dict[str, Any]
    unfinished: int
    files: list[Path]


@dataclass
class BundleFiles:
    """What a bundle's folder holds for the page; None for what is missing."""

    name: str
    calibration: Calibration | None
    log: list[dict[str, Any]] | None
    evaluation: dict[str, Any] | None
    classifier: dict[str, Any] | None
    files: list[Path]


def read_benchmark(path: str | os.PathLike) -> Benchmark:
    """Reads a folder with `measurements.jsonl` (or `.jsonl.gz`), or such a file of any name NAME.jsonl, whose
    settings stand in NAME_summary.json.

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
    beside = {
        f"{file.name.partition('.')[0]}_summary.json": EVALUATION_VERSION
    }  # of a file that stands alone
    for name, version in (SETTINGS if path.is_dir() else beside).items():
        if (place := file.parent / name).exists():
            settings = read_json(place)
            if not isinstance(settings, dict) or settings.get("format_version") != version:
                raise UserError(f"{place}: not of format {version}, which this version reads; {MEASURE}")
            files.append(place)
            break
    by_key: dict[tuple, list[Measurement]] = {}
    found, is_cut = _measurements(file)
    for temperature, measurement in found:
        key = (measurement.task, temperature, frozenset(measurement.runs))
        by_key.setdefault(key, []).append(measurement)
    groups, unfinished = [], int(is_cut)
    for (task, temperature, _), measurements in by_key.items():
        if task != TUNING:
            whole = whole_repeats(measurements)
            unfinished += len(measurements) - len(whole)
            groups.append(Group(task, temperature, whole))
    if not groups:
        raise UserError(f"{file}: holds no measurements of a benchmark; {MEASURE}")
    return Benchmark(path.name.partition(".")[0] or path.resolve().name, groups, settings, unfinished, files)


def _measurements(file: Path) -> tuple[list[tuple[float, Measurement]], bool]:
    """All measurements of a log, each with its temperature, and whether a kill cut off its last line."""
    try:
        data = file.read_bytes()
        lines = (gzip.decompress(data) if file.suffix == ".gz" else data).split(b"\n")
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{file}: cannot be read ({error}); {MEASURE}") from None
    known = {item.name for item in fields(Measurement)}
    found = []
    for number, line in enumerate(lines[:-1], 1):  # the last is empty, or was cut off
        try:
            value = json.loads(line)
            if number == 1:
                if set(value) != {"measured"}:
                    raise ValueError("no log of measurements")
                continue
            temperature = float(value.get("temperature") or 0)
            found.append((temperature, Measurement.from_json({k: v for k, v in value.items() if k in known})))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{file}: line {number} cannot be used ({error}); {MEASURE}") from None
    return found, bool(lines[-1].strip())


def whole_repeats(measurements: Sequence[Measurement]) -> list[Measurement]:
    """As many measurements as possible with the same number of repeats of every turn."""
    counts = Counter((m.prompt, m.turn) for m in measurements)
    best = max(range(1, max(counts.values()) + 1), key=lambda n: n * sum(c >= n for c in counts.values()))
    seen: Counter = Counter()
    whole = []
    for m in sorted(measurements, key=lambda m: m.repeat):  # counts come from the first
        turn = (m.prompt, m.turn)
        if counts[turn] >= best and seen[turn] < best:
            seen[turn] += 1
            whole.append(m)
    return whole


def read_bundle(path: str | os.PathLike) -> BundleFiles:
    """Reads what a bundle (or any folder with some of a bundle's JSON files) tells about itself.

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
    found = {file.name: read_json(file) for file in files if file.name != CALIBRATION}
    log, classifier = found.get(TRAINING_LOG), found.get(CLASSIFIER_REPORT)
    if log is not None and not (isinstance(log, list) and all(isinstance(entry, dict) for entry in log)):
        raise UserError(f"{folder / TRAINING_LOG}: no list of entries; train again, or delete it")
    if classifier is not None:
        _check_classifier(folder / CLASSIFIER_REPORT, classifier)
    calibration = Calibration.load(folder) if folder / CALIBRATION in files else None
    evaluation = found.get(EVALUATION)
    if evaluation is not None:
        _check_evaluation(folder / EVALUATION, evaluation)
    return BundleFiles(
        Path(path).name or folder.resolve().name, calibration, log, evaluation, classifier, files
    )


def _check_evaluation(path: Path, evaluation: Any) -> None:
    if not isinstance(evaluation, dict) or evaluation.get("format_version") != EVALUATION_VERSION:
        raise UserError(f"{path}: not of format {EVALUATION_VERSION}; evaluate the bundle again")
    try:
        for row in evaluation.get("tasks", {}).values():
            float(row["steps"] + row["verify_tokens"])
            str(evaluation["tree"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({error}); evaluate the bundle again") from None


def _check_classifier(path: Path, report: Any) -> None:
    try:
        for row in report["rows"].values():
            if not all(len(bins) == 3 for bins in row["all"]["bins"]):
                raise ValueError("a bin is incomplete")
            float(row["all"]["ece"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: damaged ({error}); train again with drafttrain c2t") from None


def points_file(path: str | os.PathLike) -> Path:
    """`points.jsonl` of a sweep, given by itself or by its folder."""
    return Path(path) / "points.jsonl" if Path(path).is_dir() else Path(path)


def read_points(path: Path) -> list[Point]:
    """Reads `points.jsonl` of a sweep.

    Raises:
        UserError: missing or damaged.
    """
    if not path.exists():
        raise UserError(f"{path}: no such file; make it with drafttrain benchmark --table sweep")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        points = [Point(**json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{path}: no points of a sweep ({error}); make them with drafttrain benchmark --table sweep"
        ) from None
    if not points:
        raise UserError(f"{path}: no points in it; make them with drafttrain benchmark --table sweep")
    return points


def source(path: Path) -> tuple[str, str]:
    """Name and first hex digits of the hash of a raw file, for the page's last lines."""
    return f"{path.parent.name}/{path.name}", sha256_file(path)[:12]
