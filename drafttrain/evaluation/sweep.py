"""`drafttrain benchmark --table sweep`: verified tokens against accept_len of any growth policies on any
prompts (C2T paper, Figure 4).

A family is what is written before the colon of a policy's text; its settings give the points. Families are
compared where their accept_len is the same, along their Pareto fronts.
"""

import contextlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from drafttrain.bundle import drafter_hash, find_bundle, load_bundle
from drafttrain.data.config import PromptSet
from drafttrain.data.prompts import Task
from drafttrain.evaluation.evaluate import progress
from drafttrain.evaluation.measure import MeasurementLog, drafting, measure
from drafttrain.evaluation.metrics import tabulate
from drafttrain.inference.decode import decode
from drafttrain.inference.proposer import Proposer
from drafttrain.inference.stats import DecodeStats
from drafttrain.kernels.machine import describe_machine
from drafttrain.target_lm.model import FrozenTarget, weights_hash
from drafttrain.trees.parse import takes_classifier, uses_calibration
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint, read_json, save_figure, write_json
from drafttrain.utils.machine import dtype_name
from drafttrain.utils.provenance import content_hash, git_commit, versions

GRID = 101  # values of accept_len over which a ratio is averaged
FIXED = (0.25, 0.5, 0.75)  # of the way through the common range: where a ratio is told by itself


@dataclass
class Point:
    """One policy on all prompts.

    Attributes:
        tree: its text.
        accept_len: tokens emitted per target forward, the target's own token included.
        verify_per_step: draft tokens sent to the target per forward, root excluded.
        verify_tokens, steps, new_tokens: what they come from.
        accept_len_fresh: accept_len outside repeated 4-grams.
        repetition: share of emitted tokens in such.
        tokens_per_second: prompt encoding included; policies do not take turns, so only a hint. 0: not timed,
            as several prompts were decoded at a time.
    """

    tree: str
    accept_len: float
    verify_per_step: float
    verify_tokens: int
    steps: int
    new_tokens: int
    accept_len_fresh: float
    repetition: float
    tokens_per_second: float

    @property
    def family(self) -> str:
        return self.tree.partition(":")[0]


@dataclass
class Comparison:
    """Verified tokens of one family divided by those of the reference, at equal accept_len.

    Attributes:
        family: which.
        low, high: common range of accept_len.
        mean: mean ratio over it.
        at: ratio at some values of accept_len.
    """

    family: str
    low: float
    high: float
    mean: float
    at: dict[float, float]


def sweep(
    bundle: str | os.PathLike,
    prompts: PromptSet,
    trees: Sequence[str],
    out: str | os.PathLike,
    reference: str = "eagle2",
    max_new_tokens: int = 96,
    target: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    calibration: str | os.PathLike | None = None,
    classifier: str | os.PathLike | None = None,
    rows: int = 1,
) -> tuple[list[Point], list[Comparison]]:
    """Decode all prompts greedily with every policy; write `points.jsonl`, `comparison.jsonl`, `sweep.png`,
    `sweep.json` (machine and versions) and, as it goes, the raw `measurements/`, where an interrupted or
    longer sweep continues.

    Args:
        trees: policies, as `parse_policy` reads them.
        reference: family that the others are compared with.
        calibration: for `pct`, `timed` and `c2t`; None for the bundle's own.
        classifier: folder of a classifier for `c2t` and `c2t_chain`; None for the bundle's own.
        rows: prompts decoded at a time. More than one is several times faster and counts the same tokens, up
            to near-ties in bf16, but nothing is timed and nothing kept of single prompts: an interruption
            loses the policy that is being measured, and no other.

    Raises:
        UserError: prompts, bundle or policies are unusable.
    """
    if rows < 1:
        raise UserError(f"--rows: must be >= 1, got {rows}")
    out, console = Path(out), Console()
    trees = list(dict.fromkeys(trees))
    task = Task.read(prompts)
    folder = find_bundle(bundle)
    loaded = load_bundle(folder, target, dtype, device, calibration, classifier=classifier)
    dtype = dtype_name(loaded.target.dtype)  # what "auto" has come to
    proposers = {tree: loaded.proposer(tree) for tree in trees}
    points = []
    for number, (tree, proposer) in enumerate(proposers.items(), 1):
        made_from = [drafter_hash(folder), target, dtype, content_hash(prompts.path), max_new_tokens]
        costs = loaded.costs_for(tree)
        if uses_calibration(tree, costs):
            made_from.append(repr(costs))
        if takes_classifier(tree):
            made_from.append(weights_hash(loaded.classifier))
        # a file of its own: more policies, or fewer, do not repeat what is measured
        place, shown = out / "measurements" / fingerprint(tree), f"{tree} ({number} of {len(trees)})"
        if rows == 1:
            log = MeasurementLog(place.with_suffix(".jsonl"), fingerprint(made_from))
            with progress(shown, [task]) as step:
                methods = {tree: drafting(loaded.target, proposer)}
                found = measure(loaded.target, methods, task, log, max_new_tokens, on_turn=step)
            row = tabulate(found)[tree]
        else:
            path = place.with_suffix(".json")
            key = fingerprint([*made_from, rows, prompts.limit, prompts.turns])
            if (row := _kept(path, key)) is None:
                row = _counted(loaded.target, proposer, task, rows, max_new_tokens, shown)
                write_json(path, {"measured": key, "stats": asdict(row)})
        names = [name for name in Point.__dataclass_fields__ if name != "tree"]
        points.append(Point(tree, **{name: getattr(row, name) for name in names}))
        if rows > 1:
            points[-1].tokens_per_second = 0.0
    comparisons = compare_families(points, reference)
    machine = describe_machine(loaded.target.device, loaded.target.dtype)
    write_json(out / "sweep.json", {"machine": machine, "versions": versions(), "commit": git_commit()})
    _write_jsonl(out / "points.jsonl", [asdict(point) for point in points])
    _write_jsonl(out / "comparison.jsonl", [asdict(found) for found in comparisons])
    _plot(points, out / "sweep.png")
    _show(points, comparisons, reference, console)
    return points, comparisons


def _kept(path: Path, key: str) -> DecodeStats | None:
    """What was counted for this key; None where a file holds anything else: older, damaged, edited."""
    with contextlib.suppress(UserError, AttributeError, KeyError, TypeError):
        kept = read_json(path)
        types = {name: type(value) for name, value in kept["stats"].items()}
        if kept["measured"] == key and types == {n: type(v) for n, v in asdict(DecodeStats()).items()}:
            return DecodeStats(**kept["stats"])
    return None


def _counted(
    target: FrozenTarget, proposer: Proposer, task: Task, rows: int, max_new_tokens: int, shown: str
) -> DecodeStats:
    """All turns of a task, `rows` prompts at a time.

    Args:
        shown: what the progress is called.

    Raises:
        UserError: a prompt does not fit the target; before anything is decoded where that is sure.
    """

    def encode(i: int, answers: Sequence[str]) -> list[int]:
        prompt = task.prompts[i]
        ids = prompt.token_ids(target.tokenizer, answers)
        target.check_length(ids, max_new_tokens, f"{task.name}: prompt {prompt.id}")
        return ids

    turns = [min(task.turns, len(prompt.turns)) for prompt in task.prompts]
    for i, played in enumerate(turns):
        encode(i, [""] * (played - 1))  # whatever the target will answer to the earlier turns
    stats = DecodeStats()
    answers: list[list[str]] = [[] for _ in turns]
    with progress(f"{shown}, {rows} prompts at a time", [task]) as step:
        for turn in range(max(turns)):
            asked = [i for i, played in enumerate(turns) if turn < played]
            ids = [encode(i, answers[i]) for i in asked]
            outputs: list[list[int]] = [[] for _ in asked]
            for made in decode(target, proposer, ids, max_new_tokens, stats=stats, max_rows=rows):
                for output, tokens, ended in zip(outputs, made.tokens, made.finish_reason):
                    output += tokens
                    if ended:
                        step()
            for i, tokens in zip(asked, outputs):
                answers[i].append(target.tokenizer.decode(tokens, skip_special_tokens=True))
    return stats


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """The points that no other matches in accept_len with fewer verified tokens, by accept_len."""
    front: list[Point] = []
    for point in sorted(points, key=lambda p: (-p.accept_len, p.verify_per_step)):
        if not front or point.verify_per_step < front[-1].verify_per_step:
            front.append(point)
    return front[::-1]


def compare_families(points: Sequence[Point], reference: str) -> list[Comparison]:
    """Each family but the reference against it, where their fronts have a common range of accept_len; on
    straight lines between the points of a front."""
    fronts = {
        # one that verifies nothing gives no ratio
        family: pareto_front([p for p in points if p.family == family and p.verify_per_step > 0])
        for family in dict.fromkeys(point.family for point in points)
    }
    base = fronts.pop(reference, [])
    found = []
    for family, front in fronts.items():
        if not base or not front:
            continue
        low = max(front[0].accept_len, base[0].accept_len)
        high = min(front[-1].accept_len, base[-1].accept_len)
        if low > high:
            continue
        grid = np.linspace(low, high, GRID)
        ratios = verified_at(front, grid) / verified_at(base, grid)  # [GRID]
        at = {float(grid[i]): float(ratios[i]) for i in (round(share * (GRID - 1)) for share in FIXED)}
        found.append(Comparison(family, low, high, float(ratios.mean()), at))
    return found


def verified_at(front: Sequence[Point], accept_len: np.ndarray) -> np.ndarray:
    """Draft tokens verified per step at some accept_len [n] within the range of a front, on straight lines
    between its points."""
    return np.interp(accept_len, [p.accept_len for p in front], [p.verify_per_step for p in front])


def _write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(temporary, path)


def _plot(points: Sequence[Point], path: Path) -> None:
    figure = Figure(figsize=(7, 5))
    axis = figure.subplots()
    for i, family in enumerate(dict.fromkeys(point.family for point in points)):
        mine = [point for point in points if point.family == family]
        front = pareto_front(mine)
        axis.scatter(
            [p.accept_len for p in mine], [p.verify_per_step for p in mine], s=14, color=f"C{i}", label=family
        )
        axis.plot([p.accept_len for p in front], [p.verify_per_step for p in front], color=f"C{i}", alpha=0.5)
    axis.set_xlabel("accept_len")
    axis.set_ylabel("draft tokens verified per step")
    axis.legend()
    save_figure(figure, path)


def _show(
    points: Sequence[Point], comparisons: Sequence[Comparison], reference: str, console: Console
) -> None:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("tree", overflow="fold")
    for head in ("accept_len", "verified/step", "repetition"):
        table.add_column(head, justify="right", no_wrap=True)
    for point in points:
        cells = (f"{point.accept_len:.3f}", f"{point.verify_per_step:.2f}", f"{point.repetition:.3f}")
        table.add_row(point.tree, *cells)
    console.print(table)
    for found in comparisons:
        at = ", ".join(f"{ratio:.3f} at {accept_len:.2f}" for accept_len, ratio in found.at.items())
        console.print(
            f"{found.family} verifies {found.mean:.3f} of what {reference} does at equal accept_len (mean "
            f"over {found.low:.2f} to {found.high:.2f}; {at})",
            highlight=False,
            soft_wrap=True,
        )
    if reference not in {point.family for point in points}:
        console.print(f"no tree of {reference} among them, so nothing is compared", highlight=False)
        return
    compared = {reference, *(found.family for found in comparisons)}
    if alone := sorted({point.family for point in points} - compared):
        console.print(f"no accept_len in common with {reference}: {', '.join(alone)}", highlight=False)
