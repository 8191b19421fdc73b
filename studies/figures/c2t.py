"""The figures of topic `c2t`: what a trained classifier saves, where it carries over, what it costs.

C2T is the classifier over P, H, d, as in its paper, and one classifier has all figures. Over P, d it is ours.
Sweeps decode the benchmarks greedily and count; they are not timed. Dumping, training, `draft_time` and
`auto_beta` are, and want the machine for themselves.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drafttrain.bundle import load_bundle
from drafttrain.calibration.calibration import FILE as CALIBRATION
from drafttrain.calibration.config import CalibrateConfig
from drafttrain.classifier.config import ClassifierConfig, DumpConfig
from drafttrain.classifier.dump import read_record
from drafttrain.classifier.model import WEIGHTS, Classifier
from drafttrain.classifier.train import train_classifier
from drafttrain.data.config import PromptSet
from drafttrain.data.prompts import Task, read_prompts, spread
from drafttrain.evaluation.measure import MeasurementLog
from drafttrain.evaluation.metrics import Measurement, ratio, ratio_interval, ratio_spread, tabulate
from drafttrain.evaluation.sweep import (
    Point,
    compare_families,
    interval_of,
    pareto_front,
    resampled_means,
    sweep,
)
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import TreeProposer
from drafttrain.run.c2t import dump_trees
from drafttrain.run.calibrate import calibrate
from drafttrain.trees.c2t import C2tPolicy
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint
from drafttrain.utils.provenance import content_hash, versions
from studies.goals import (
    AT_LEAST,
    FIRST_TURNS,
    RAW,
    Group,
    Measured,
    Run,
    Size,
    run_and_watch,
    size_of,
)
from studies.policies import GRIDS, compare, tune

DRAFTER = Path("model_cards/smollm2-135m-edd")
EARLIER = "5db9727"  # commit whose drafter was trained for fewer steps, on 8,192 draft tokens
HELD_OUT = "data/heldout_prompts.jsonl"
TUNING = "data/tuning_prompts.jsonl"
TASKS = {
    "mt_bench": "data/eval/mt_bench.jsonl",
    "gsm8k": "data/eval/gsm8k_test_80.jsonl",
    "humaneval": "data/eval/humaneval.jsonl.gz",
    "summarization": "data/eval/summarization.jsonl",
    "questions": "data/eval/questions.jsonl",
}
NEW_TOKENS = 96
ROWS_AT_ONCE = 8  # prompts of a sweep that are decoded together
FEATURES = ("P", "H", "d")  # the paper's
ROWS = 9_000_000  # that the classifier is trained on where its training is timed
REPEATS = 3
EAGLE2 = [f"eagle2:top_k=10,max_depth=10,total={n}" for n in (4, 8, 14, 24, 40, 60)]
EAGLE2 += ["eagle2:top_k=4,max_depth=5,total=8", "eagle2:top_k=4,max_depth=6,total=16"]
EAGLE2 += [f"eagle2:top_k=10,max_depth=6,total={n}" for n in (24, 50)]
# as many settings of each family: more points lower a front
JOINT = [f"joint:threshold={p}" for p in (0.35, 0.25, 0.17, 0.12, 0.086, 0.061, 0.043, 0.03, 0.021, 0.015)]
C2T = [f"c2t:beta={p}" for p in (0.45, 0.33, 0.24, 0.17, 0.125, 0.09, 0.065, 0.048, 0.034, 0.025)]
CHAINS = [f"chain:length={n}" for n in (5, 6, 7, 8, 9, 10)]
CHAINS += [f"c2t_chain:beta={p}" for p in (0.4, 0.25, 0.15, 0.08, 0.04, 0.02)]
CHAINS += [f"dyjoint:threshold={p}" for p in (0.4, 0.25, 0.15, 0.08, 0.04, 0.015)]
CHAINS += [f"dymax:threshold={p}" for p in (0.7, 0.55, 0.4, 0.3, 0.2, 0.1)]


# trees and classifiers


def dumped(run: Run) -> Measured:
    """Grow full trees below the roots of held-out prompts, labelled by the target's own continuation."""
    run.check_quiet()
    limit, tokens = (8, 24) if run.quick else (None, 256)
    config = DumpConfig(PromptSet("held out", HELD_OUT, limit), max_new_tokens=tokens)
    record = dump_trees(config, DRAFTER, run.folder("c2t_trees"))
    notes = {name: record[name] for name in ("trees", "rows", "accepted", "nodes")} | run.quick_note
    return {"dump_trees_per_s": {"value": record["trees"] / record["seconds"], **notes}}


def trained(run: Run) -> Measured:
    """Train a classifier on the last full dump, by the command line, its process watched."""
    run.check_quiet()
    trees = RAW / "full/c2t_trees"
    rows = read_record(trees)["rows"]  # before the folder is emptied
    folder = run.folder("c2t_classifier")
    command = [sys.executable, "-m", "drafttrain.run.cli", "c2t", "--trees", str(trees)]
    command += ["--out", str(folder), "--features", ",".join(FEATURES)]
    status, seconds, peak = run_and_watch(command, Path.cwd(), dict(os.environ), folder / "log.txt")
    if status:
        raise RuntimeError(f"c2t ended with {status}; see {folder / 'log.txt'}")
    notes = {"rows": rows, "ok": rows >= ROWS}
    return {
        "train_9m_rows_s": {"value": seconds, **notes},
        "train_9m_rows_gb": {"value": peak / 1e9, **notes},
    }


def classifier(run: Run, bundle: Path | None = None, own: str = "c2t_classifier") -> Path:
    """Return the folder of the classifier that was made for these figures, or else the drafter's own.

    Args:
        bundle: the drafter's; None: that of SmolLM2.
        own: name of the first one, under the raw data.

    Raises:
        UserError: there is none, or it reads other features than C2T's.
    """
    fresh = RAW / "full" / own
    remedy = "python -m studies.figures c2t --only dump_trees_per_s --only train_9m_rows_s"
    if bundle is not None:
        remedy = f"drafttrain c2t {bundle} --target FILE --prompts data/heldout_prompts.jsonl --out {fresh}"
    bundle = bundle or DRAFTER
    place = fresh if (fresh / WEIGHTS).exists() and not run.quick else bundle
    if not (place / WEIGHTS).exists():
        raise UserError(f"{bundle}: no classifier; make one with {remedy}")
    if (features := tuple(Classifier.load(place).features)) != FEATURES:
        wanted, found = ", ".join(FEATURES), ", ".join(features)
        raise UserError(
            f"{place}: the classifier must read {wanted} as C2T's, got {found}; make one with {remedy}"
        )
    return place


def classifier_notes(place: Path) -> dict[str, str]:
    """Return which classifier a figure is of."""
    return {"classifier": str(place), "weights": content_hash(place / WEIGHTS)[:16]}


# verified tokens at equal accept_len


def subset(
    run: Run, folder: Path, task: str, path: str, quick: int = 2, full: int | None = None
) -> PromptSet:
    """Write some first turns at equal distances through a file."""
    prompts = spread(read_prompts(path), run.prompts(quick, full))
    kept = folder / f"{task}.jsonl"
    lines = (json.dumps({"id": prompt.id, "prompt": prompt.turns[0]}) + "\n" for prompt in prompts)
    kept.write_text("".join(lines), encoding="utf-8")
    return PromptSet(task, str(kept))


def count(prompts: PromptSet) -> int:
    """Return the number of prompts of a file of `subset`."""
    return len(Path(prompts.path).read_text(encoding="utf-8").splitlines())


def thinned(run: Run, trees: Sequence[str]) -> list[str]:
    """Return every setting, or in quick runs every second one."""
    return list(trees[:: 2 if run.quick else 1])


def swept(run: Run) -> Measured:
    """Compare C2T, EAGLE-2 and a threshold on joint probability over all tasks."""
    tasks = {
        task: (path, None if task == "mt_bench" else AT_LEAST)
        for task, path in (TASKS | run.more_prompts).items()
    }
    place = classifier(run)
    found, size = compared(run, DRAFTER, place, tasks, run.folder("c2t_sweep"))
    notes = {**classifier_notes(place), "size": {"prompts": size}}
    return {
        name: {**found[reference], **notes}
        for name, reference in (
            ("verify_tokens_vs_eagle2", "eagle2"),
            ("verify_tokens_vs_p_threshold", "joint"),
        )
    }


def compared(
    run: Run,
    bundle: str | Path,
    place: Path,
    tasks: Mapping[str, tuple[str, int | None]],
    folder: Path,
    target: str | None = None,
) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    """Compare C2T at equal accept_len with EAGLE-2 and with a threshold on joint probability.

    Args:
        place: folder of the classifier.
        tasks: name -> (file, prompts at full size).
        target: of the bundle; None for the one that it names.

    Returns:
        `mean_over_tasks` by reference, and the prompts of each task.
    """
    trees = [tree for family in (EAGLE2, JOINT, C2T) for tree in thinned(run, family)]
    against: dict[str, dict[str, Any]] = {"eagle2": {}, "joint": {}}
    drawn: dict[str, list[np.ndarray]] = {"eagle2": [], "joint": []}
    size = {}
    for task, (path, full) in tasks.items():
        prompts = subset(run, folder, task, path, full=full)
        size[task] = count(prompts)
        points = sweep(
            bundle,
            prompts,
            trees,
            folder / task,
            "eagle2",
            NEW_TOKENS,
            target=target,
            classifier=place,
            rows=ROWS_AT_ONCE,
        )[0]
        for reference, of_tasks in against.items():
            found = [c for c in compare_families(points, reference) if c.family == "c2t"]
            of_tasks[task] = asdict(found[0]) if found else None
            if (means := resampled_means(points, "c2t", reference)) is not None:
                drawn[reference].append(means)
    return {name: mean_over_tasks(of_tasks, drawn[name]) for name, of_tasks in against.items()}, size


def mean_over_tasks(
    tasks: dict[str, dict[str, Any] | None], drawn: Sequence[np.ndarray] = ()
) -> dict[str, Any]:
    """Return the mean ratio of all tasks with its interval, and each of them.

    Args:
        drawn: the ratio of each task in resamples of its prompts; the intervals are left out where one of a
            task is missing.
    """
    if missing := [task for task, found in tasks.items() if found is None]:
        return {"value": None, "error": f"no accept_len in common on {', '.join(missing)}", "tasks": tasks}
    means = {task: found["mean"] for task, found in tasks.items()}
    notes: dict[str, Any] = {"worst": max(means.values()), "tasks": tasks}
    if len(drawn) == len(tasks):
        # in an order of its own: tasks of as many prompts have the same draws
        apart = [np.random.default_rng(i).permutation(means) for i, means in enumerate(drawn)]
        notes["interval"] = interval_of(np.mean(apart, 0))
    return {"value": statistics.mean(means.values()), **notes}


def chains(run: Run) -> Measured:
    """Compare early stops of chains on MT-bench."""
    folder = run.folder("c2t_chains")
    prompts = subset(run, folder, "mt_bench", TASKS["mt_bench"], quick=4)
    size = {"size": {"prompts": {"mt_bench": count(prompts)}}}
    place = classifier(run)
    points = sweep(
        DRAFTER, prompts, CHAINS, folder, "dyjoint", NEW_TOKENS, classifier=place, rows=ROWS_AT_ONCE
    )[0]
    return {
        name: {**figure, **classifier_notes(place), **size} for name, figure in chain_figures(points).items()
    }


def chain_figures(points: Sequence[Point]) -> Measured:
    """Compare C2T's chains at the accept_len of a fixed chain of 9, and against other early stops."""
    [nine] = (point for point in points if point.tree == "chain:length=9")
    front = pareto_front([point for point in points if point.family == "c2t_chain"])
    span = [front[0].accept_len, front[-1].accept_len]
    at_nine: dict[str, Any] = {"value": None, "error": "its accept_len is not among those of C2T"}
    if span[0] <= nine.accept_len <= span[1]:
        places = [point.accept_len for point in front], [point.verify_per_step for point in front]
        verified = float(np.interp(nine.accept_len, *places))
        at_nine = {"value": verified / nine.verify_per_step}
    measured = {"chain_verify_tokens_vs_fixed9": {**at_nine, "accept_len": nine.accept_len, "range": span}}
    for reference in ("dyjoint", "dymax"):
        found = [c for c in compare_families(points, reference) if c.family == "c2t_chain"]
        notes = asdict(found[0]) if found else {"error": "no accept_len in common"}
        measured[f"chain_vs_{reference}"] = {"value": found[0].mean if found else None, **notes}
    return measured


def transferred(run: Run) -> Measured:
    """Compare with classifiers that learned from one other task, and from another drafter of the target."""
    folder = run.folder("c2t_transfer")
    math_prompts = folder / "gsm8k_train.jsonl"
    lines = Path(HELD_OUT).read_text(encoding="utf-8").splitlines(keepends=True)
    math_prompts.write_text("".join(line for line in lines if json.loads(line)["id"].startswith("gsm8k")))
    foreign = {
        "another task": (DRAFTER, str(math_prompts)),
        "another drafter": (earlier_drafter(folder), HELD_OUT),
    }
    prompts = subset(run, folder, "mt_bench", TASKS["mt_bench"])
    size = {"prompts": {"mt_bench": count(prompts)}}
    trained_here = classifier(run)
    own = sweep(
        DRAFTER, prompts, C2T, folder / "own", "c2t", NEW_TOKENS, classifier=trained_here, rows=ROWS_AT_ONCE
    )[0]
    losses, notes = {}, {}
    for number, (name, (bundle, path)) in enumerate(foreign.items()):
        place = folder / f"foreign{number}"
        dump_trees(DumpConfig(PromptSet("held out", path, 60), 128), bundle, place / "trees")
        train_classifier(
            ClassifierConfig(features=FEATURES), place / "trees", place / "classifier", baselines=False
        )
        points = sweep(
            DRAFTER,
            prompts,
            C2T,
            place / "sweep",
            "c2t",
            NEW_TOKENS,
            classifier=place / "classifier",
            rows=ROWS_AT_ONCE,
        )[0]
        renamed = [replace(point, tree=point.tree.replace("c2t", "foreign")) for point in points]
        found = compare_families([*own, *renamed], "c2t")
        if not found:
            raise UserError(f"transfer_loss: {name}: no accept_len in common; take more prompts (--limit)")
        losses[name], notes[name] = found[0].mean - 1, asdict(found[0])
    notes |= classifier_notes(trained_here)
    found = {"value": max(losses.values()), "losses": losses, "comparisons": notes, "size": size}
    return {"transfer_loss": found}


def earlier_drafter(folder: Path) -> Path:
    """Write the drafter of an earlier commit, out of the repository's history."""
    place = folder / "earlier"
    place.mkdir(exist_ok=True)
    listed = subprocess.run(
        ["git", "ls-tree", "--name-only", EARLIER, f"{DRAFTER}/"], capture_output=True, text=True
    )
    if listed.returncode:
        reason = " ".join(listed.stderr.split())
        raise UserError(f"transfer_loss needs the repository's history, commit {EARLIER}: {reason}")
    for name in listed.stdout.splitlines():
        content = subprocess.run(["git", "show", f"{EARLIER}:{name}"], capture_output=True, check=True).stdout
        (place / Path(name).name).write_bytes(content)
    return place


# time


@dataclass
class ClockedPolicy(C2tPolicy):
    """C2T that looks at the clock while it asks the classifier; entropies are computed with the children."""

    seconds: float = 0.0

    def _confidence(self, *args, **kwargs) -> tuple[np.ndarray, torch.Tensor]:
        started = time.perf_counter()
        judged = super()._confidence(*args, **kwargs)
        self.seconds += time.perf_counter() - started
        return judged


def draft_time(run: Run) -> Measured:
    """Measure features and classifier as a share of the whole time of drafting, entropies left out."""
    run.check_quiet()
    place = classifier(run)
    loaded = load_bundle(DRAFTER, dtype="bfloat16", classifier=place)
    prompts = spread(read_prompts(TASKS["mt_bench"]), run.prompts(quick=3, full=None))
    shares = {}
    for beta in (0.05, 0.1, 0.2):
        policy = ClockedPolicy(loaded.classifier, beta)
        proposer, drafting = TreeProposer(loaded.drafter, policy), 0.0
        for number, prompt in enumerate(prompts):
            ids = prompt.token_ids(loaded.target.tokenizer)
            if not number:  # the first forwards of a process are slow
                decode_all(loaded.target, proposer, [ids], 16)
                policy.seconds = 0.0
            drafting += decode_all(loaded.target, proposer, [ids], NEW_TOKENS)[1].draft_seconds
        shares[f"beta {beta}"] = policy.seconds / drafting
    notes = {"shares": shares, **classifier_notes(place), "size": {"prompts": {"mt_bench": len(prompts)}}}
    return {"draft_time_added": {"value": max(shares.values()), **notes}}


def auto_beta(run: Run) -> Measured:
    """Time C2T with the thresholds that calibration found, against PCT tuned on the tuning prompts."""
    run.check_quiet()
    folder, own = run.folder("c2t_auto"), classifier(run)
    place = folder / f"calibration-{classifier_notes(own)['weights']}"
    if not (place / CALIBRATION).exists():
        prompts = PromptSet("tuning", TUNING, 6 if run.quick else 24)
        config = CalibrateConfig(prompts=prompts, rounds=4 if run.quick else 15, busy=run.busy)
        calibrate(config, DRAFTER, place, dtype="bfloat16", classifier=own)
    loaded = load_bundle(DRAFTER, dtype="bfloat16", calibration=place, classifier=own)
    key = fingerprint([content_hash(DRAFTER), content_hash(place), NEW_TOKENS, versions()])
    task = Task("(tuning)", read_prompts(TUNING, run.prompts(quick=2, full=12)))
    grids = {"pct": [*GRIDS["pct"], *GRIDS["pct-tuned"]]}  # the strongest PCT, published or tuned
    chosen, _ = tune(loaded, task, MeasurementLog(folder / "tuning.jsonl", key), NEW_TOKENS, grids)
    trees = {"pct": chosen["pct"], "c2t": "c2t"}
    task = Task("mt_bench", spread(read_prompts(TASKS["mt_bench"]), run.prompts(quick=3, full=None)))
    log = MeasurementLog(folder / "measurements.jsonl", fingerprint([key, chosen, classifier_notes(own)]))
    measured = compare(loaded, trees, [task], log, NEW_TOKENS, 1 if run.quick else REPEATS)["mt_bench"]
    notes = {"beta": loaded.calibration.beta, "expand": loaded.calibration.expand, "pct": chosen["pct"]}
    return {"auto_beta_vs_pct": {**against_pct(measured), **notes, **classifier_notes(own)}}


def against_pct(measured: Sequence[Measurement]) -> dict[str, Any]:
    """Return tokens per second of C2T over PCT's."""
    return {
        "value": ratio(measured, "pct", "c2t"),
        "repeats": ratio_spread(measured, "pct", "c2t"),
        "interval": ratio_interval(measured, "pct", "c2t"),
        "flags": tabulate(measured)["c2t"].flags,
        "size": size_of(measured),
    }


GROUPS = [
    Group({"dump_trees_per_s": ">= 15"}, dumped),
    Group({"train_9m_rows_s": "<= 180", "train_9m_rows_gb": "<= 2"}, trained, long=True),
    Group(
        {"verify_tokens_vs_eagle2": "<= 0.75", "verify_tokens_vs_p_threshold": "<= 0.92"},
        swept,
        size=Size({**dict.fromkeys(TASKS, AT_LEAST), **FIRST_TURNS}),
    ),
    Group(
        {
            "chain_verify_tokens_vs_fixed9": "<= 0.65",
            "chain_vs_dyjoint": "<= 0.92",
            "chain_vs_dymax": "<= 0.92",
        },
        chains,
        size=Size(FIRST_TURNS),
    ),
    Group({"transfer_loss": "<= 0.05"}, transferred, long=True, size=Size(FIRST_TURNS)),
    Group({"draft_time_added": "<= 0.08"}, draft_time, size=Size(FIRST_TURNS)),
    Group({"auto_beta_vs_pct": ">= 1.0"}, auto_beta, size=Size(FIRST_TURNS, REPEATS)),
]
