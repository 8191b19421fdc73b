"""The figures of topic `flagship` on PCT and C2T as published, on each target that is given.

SmolLM2 with the committed EDD drafter; with --target, Qwen2.5-Coder-0.5B-Instruct with its own; with --pair
TARGET DRAFTER, the 1.5B with the 0.5B unchanged. A goal has to be reached on one of them: a figure's value is
that of the best, and its record has all. Estimated minutes at full size on 2 cores, for SmolLM2 and for the
0.5B, and several times as many for the 1.5B: `pct_vs_eagle2_verify` 15 and 60, `c2t_vs_eagle2` and
`c2t_vs_p_threshold` together 80 and 300 (nothing is timed), `pct_vs_eagle2_speed` 20 and 60 of a quiet
machine.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from drafttrain.bundle import load_bundle
from drafttrain.classifier.model import Classifier
from drafttrain.data.prompts import Task, read_prompts, spread
from drafttrain.evaluation.measure import MeasurementLog, drafting, measure
from drafttrain.evaluation.methods import costs_of
from drafttrain.evaluation.metrics import noise, ratio, ratio_interval, ratio_spread, tabulate
from drafttrain.evaluation.sweep import RESAMPLES, Point, interval_of, sweep
from drafttrain.utils.files import fingerprint
from drafttrain.utils.provenance import content_hash, git_commit
from studies.figures import c2t, second_target
from studies.figures.machine_setting import DRAFTER, NEW_TOKENS, REPEATS, TUNING
from studies.goals import Group, Measured, Run, Size
from studies.policies import EAGLE2_LARGE, GRIDS, LARGE, PCT_LARGE

OTHERS = 40  # prompts of each task but MT-bench
TASKS = {
    "mt_bench": ("data/eval/mt_bench.jsonl", None),
    "gsm8k": ("data/eval/gsm8k_test_80.jsonl", OTHERS),
    "humaneval": ("data/eval/humaneval.jsonl.gz", OTHERS),
    "summarization": ("data/eval/summarization.jsonl", OTHERS),
    "questions": ("data/eval/questions.jsonl", OTHERS),
}
SHORTEST = 0.97  # of EAGLE-2's accept_len, on every task
SMOLLM2, QWEN, PAIR = "smollm2", "qwen05", "qwen15"
SIZES = {
    SMOLLM2: Size({name: full or 80 for name, (_, full) in TASKS.items()}),
    **dict.fromkeys((QWEN, PAIR), Size(dict.fromkeys(second_target.TASKS, OTHERS) | {"mt_bench": 80})),
}
TIMED_SIZES = {name: Size(size.prompts, REPEATS) for name, size in SIZES.items()}


@dataclass(frozen=True)
class Pairing:
    """A target with its drafter.

    Attributes:
        bundle: folder of the drafter, or a small LM.
        target: its file; None for the one that the bundle names.
        tasks: name -> (file, prompts at full size).
    """

    bundle: str
    target: str | None
    tasks: Mapping[str, tuple[str, int | None]]


def pairings(run: Run) -> dict[str, Pairing]:
    """Return the pairings that a run can measure, by name."""
    found = {SMOLLM2: Pairing(str(DRAFTER), None, TASKS)}
    tasks = {name: (path, OTHERS) for name, (path, _) in second_target.TASKS.items()}
    tasks |= {"mt_bench": TASKS["mt_bench"]}
    if run.target:
        found[QWEN] = Pairing(second_target.DRAFTER, run.target, tasks)
    if run.pair:
        target, drafter = run.pair
        found[PAIR] = Pairing(drafter, target, tasks)
    return found


def raw_folder(run: Run, name: str) -> Path:
    """Return the folder of a group's raw data, which are of these targets."""
    return run.folder(name, target=run.target, **({"pair": run.pair} if run.pair else {}))


def verified(run: Run) -> Measured:
    """Count what PCT as published, with this machine's costs, verifies over EAGLE-2's 50 nodes."""
    folder, found, sizes = raw_folder(run, "published_pct"), {}, {}
    trees = [LARGE[EAGLE2_LARGE], LARGE[PCT_LARGE]]
    for name, pairing in pairings(run).items():
        rows, sizes[name] = {}, {}
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        for task, (path, full) in pairing.tasks.items():
            prompts = c2t.subset(run, place, task, path, full=full)
            points, _ = sweep(
                pairing.bundle,
                prompts,
                trees,
                place / task,
                max_new_tokens=NEW_TOKENS,
                target=pairing.target,
                rows=c2t.ROWS_AT_ONCE,
            )
            rows[task] = over(points[1], points[0])
            sizes[name][task] = c2t.count(prompts)
        found[name] = worst(rows)
    row = best(found)
    size = {"prompts": sizes[row["target"]]}
    return {"pct_vs_eagle2_verify": {**row, "targets": found, "size": size}}


def over(point: Point, base: Point) -> dict[str, Any]:
    """Return verified tokens per step and accept_len of one policy over those of another on the same prompts,
    with intervals (bootstrap over prompts)."""
    counts = np.array([point.by_prompt, base.by_prompt])  # [2, prompts, 3]
    draws = np.random.default_rng(0).integers(counts.shape[1], size=(RESAMPLES, counts.shape[1]))
    emitted, steps, sent = counts[:, draws].sum(2).transpose(2, 0, 1)  # each [2, RESAMPLES]
    verify, length = ((sums[0] / steps[0]) / (sums[1] / steps[1]) for sums in (sent, emitted))
    return {
        "verify": point.verify_per_step / base.verify_per_step,
        "verify_interval": interval_of(verify),
        "accept_len": point.accept_len / base.accept_len,
        "accept_len_interval": interval_of(length),
        "accept_lens": [point.accept_len, base.accept_len],
    }


def worst(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the tasks of a target, with the one on which most is verified."""
    task = max(rows, key=lambda name: rows[name]["verify"])
    shortest = min(row["accept_len"] for row in rows.values())
    most = {"verify": rows[task]["verify"], "interval": rows[task]["verify_interval"], "task": task}
    return {**most, "shortest": shortest, "tasks": dict(rows)}


def best(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the value of the target with the fewest verified tokens, of those whose accept_len is long
    enough on every task; without any the figure is missed."""
    long = {name: row for name, row in found.items() if row["shortest"] >= SHORTEST}
    name = min(long or found, key=lambda one: found[one]["verify"])
    notes = {} if long else {"ok": False}
    row = found[name]
    return {"value": row["verify"], "interval": row["interval"], "target": name, **notes}


def judged(run: Run) -> Measured:
    """Compare C2T with EAGLE-2 and a threshold on joint probability, each target with a classifier over C2T's
    features."""
    folder = raw_folder(run, "published_c2t")
    found: dict[str, dict[str, dict[str, Any]]] = {"eagle2": {}, "joint": {}}
    sizes, classifiers = {}, {}
    for name, pairing in pairings(run).items():  # all of them before hours are spent on the first
        bundle = Path(pairing.bundle)
        classifiers[name] = c2t.classifier(run, *(() if bundle == DRAFTER else (bundle, f"c2t_{name}")))
    for name, pairing in pairings(run).items():
        place = folder / name
        place.mkdir(parents=True, exist_ok=True)
        bundle, classifier = Path(pairing.bundle), classifiers[name]
        own, sizes[name] = c2t.compared(run, bundle, classifier, pairing.tasks, place, pairing.target)
        notes = {"features": list(Classifier.load(classifier).features), **c2t.classifier_notes(classifier)}
        for reference, row in own.items():
            found[reference][name] = row | notes
    figures = {"c2t_vs_eagle2": "eagle2", "c2t_vs_p_threshold": "joint"}
    rows = {figure: fewest(found[reference]) for figure, reference in figures.items()}
    return {
        figure: row | {"size": {"prompts": sizes[row.get("target", SMOLLM2)]}} for figure, row in rows.items()
    }


def fewest(found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the value of the target on which C2T verifies fewest tokens, and all targets."""
    known = {name: row for name, row in found.items() if row["value"] is not None}
    if not known:
        return {"value": None, "error": next(iter(found.values()))["error"], "targets": dict(found)}
    name = min(known, key=lambda one: known[one]["value"])
    interval = {"interval": known[name]["interval"]} if "interval" in known[name] else {}
    return {"value": known[name]["value"], **interval, "target": name, "targets": dict(found)}


def faster(run: Run) -> Measured:
    """Time PCT as published against EAGLE-2, each at the setting that is fastest on the tuning prompts."""
    run.check_quiet()
    folder, found, sizes = raw_folder(run, "published_speed"), {}, {}
    repeats = 1 if run.quick else REPEATS
    for name, pairing in pairings(run).items():
        loaded = load_bundle(pairing.bundle, target=pairing.target, dtype="bfloat16")
        trees = [*GRIDS["eagle2"], *GRIDS["pct"]]
        methods = {tree: drafting(loaded.target, loaded.proposer(tree)) for tree in trees}
        costs = [costs_of(loaded, tree) for tree in trees]
        key = fingerprint([content_hash(pairing.bundle), NEW_TOKENS, git_commit(), trees, costs])
        tuning = Task("(tuning)", read_prompts(TUNING, run.prompts(quick=2, full=12)))
        log = MeasurementLog(folder / f"{name}_tuning.jsonl", key)
        speeds = {
            tree: row.tokens_per_second
            for tree, row in tabulate(measure(loaded.target, methods, tuning, log, NEW_TOKENS)).items()
        }
        eagle2, pct = (max(GRIDS[policy], key=speeds.__getitem__) for policy in ("eagle2", "pct"))
        log = MeasurementLog(folder / f"{name}.jsonl", fingerprint([key, eagle2, pct]))
        tasks, sizes[name] = {}, {}
        for task, (path, full) in pairing.tasks.items():
            prompts = spread(read_prompts(path), run.prompts(quick=2, full=full))
            two = {tree: methods[tree] for tree in (eagle2, pct)}
            measured = measure(loaded.target, two, Task(task, prompts), log, NEW_TOKENS, repeats)
            value, single = ratio(measured, eagle2, pct), ratio_spread(measured, eagle2, pct)
            tasks[task] = {
                "value": value,
                "interval": ratio_interval(measured, eagle2, pct),
                "flags": [*tabulate(measured)[pct].flags, *noise(single, value)],
            }
            sizes[name][task] = len(prompts)
        slowest = min(tasks, key=lambda task: tasks[task]["value"])
        found[name] = {**tasks[slowest], "task": slowest, "trees": [pct, eagle2], "tasks": tasks}
    name = max(found, key=lambda one: found[one]["value"])
    row = {key: found[name][key] for key in ("value", "interval", "flags")}
    size = {"prompts": sizes[name], "repeats": repeats}
    return {"pct_vs_eagle2_speed": {**row, "target": name, "targets": found, "size": size}}


GROUPS = [
    Group({"pct_vs_eagle2_verify": "<= 0.60"}, verified, size=SIZES[SMOLLM2], sizes=SIZES),
    Group({"pct_vs_eagle2_speed": "> 1.0"}, faster, size=TIMED_SIZES[SMOLLM2], sizes=TIMED_SIZES),
    Group(
        {"c2t_vs_eagle2": "<= 0.75", "c2t_vs_p_threshold": "<= 0.92"},
        judged,
        long=True,
        size=SIZES[SMOLLM2],
        sizes=SIZES,
    ),
]
