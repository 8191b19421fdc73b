"""The evaluation stage: a benchmark of one bundle that first chooses its tree, and checks that it is exact.

The tree is chosen on tuning prompts, never on the prompts that are reported. `measurements.jsonl` is written
turn by turn, and an interrupted evaluation continues there.
"""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from drafttrain.bundle import Bundle, load_bundle
from drafttrain.calibration.calibration import Calibration
from drafttrain.data.chat import template_hash, tokenizer_hash
from drafttrain.data.prompts import Task, first_of_each
from drafttrain.evaluation.benchmark import conditions
from drafttrain.evaluation.config import ALL, EvaluateConfig
from drafttrain.evaluation.exactness import check_lossless
from drafttrain.evaluation.measure import (
    MeasurementLog,
    autoregressive,
    check_lengths,
    drafting,
    measure_tasks,
    transformers_generate,
)
from drafttrain.evaluation.methods import costs_of
from drafttrain.evaluation.metrics import AUTOREGRESSIVE, TRANSFORMERS, tabulate
from drafttrain.evaluation.proposers import find_drafter, usable_proposers
from drafttrain.evaluation.report import print_tables
from drafttrain.evaluation.stock import load_stock
from drafttrain.kernels.machine import describe_machine, dtype_name
from drafttrain.target_lm.model import weights_hash
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint
from drafttrain.utils.machine import check_quiet
from drafttrain.utils.progress import counted
from drafttrain.utils.provenance import content_hash, versions
from drafttrain.utils.writing import write_json

FORMAT_VERSION = 2  # of summary.json and eval.json
FIGURES = ("accept_len", "speedup", "speedup_transformers", "tokens_per_second")


def try_trees(
    loaded: Bundle, task: Task, trees: Sequence[str], log: MeasurementLog, **options: Any
) -> list[dict[str, Any]]:
    """Measure speed and accept_len of several growth policies, interleaved.

    Args:
        options: of `measure_tasks`.

    Returns:
        `tree`, `tokens_per_second` and `accept_len` of each policy that can be used.

    Raises:
        UserError: none can be used, or a prompt does not fit the target.
    """
    proposers = usable_proposers(loaded, trees)
    methods = {tree: drafting(loaded.target, proposer) for tree, proposer in proposers.items()}
    rows = tabulate(measure_tasks(loaded.target, methods, [task], log, "choosing the tree", **options))
    return [
        {"tree": tree, "tokens_per_second": row.tokens_per_second, "accept_len": row.accept_len}
        for tree, row in rows.items()
    ]


def evaluate(
    config: EvaluateConfig,
    bundle: str | os.PathLike,
    out: str | os.PathLike,
    target: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    calibration: str | os.PathLike | None = None,
    classifier: str | os.PathLike | None = None,
    ngrams: str | os.PathLike | None = None,
) -> dict[str, Any]:
    """Measure a bundle and print a table per task.

    Writes `summary.json` (everything), `eval.json` (the part that a bundle carries, with the `tree` to use)
    and, as it goes, the raw `measurements.jsonl` and `lossless.jsonl`.

    Args:
        bundle: folder or Hub id.
        out: folder to write to; an interrupted evaluation of the same things is continued.
        target: None for the one that the bundle names.
        dtype: of the timed decoding; device: of all decoding; both as `load_target` takes them.
        calibration: for `pct`, `timed` and `c2t`; None for the bundle's own.
        classifier: folder of a classifier for `c2t` and `c2t_chain`; None for the bundle's own.
        ngrams: folder of an n-gram cache for `ngram` and `ngram+POLICY`; None for the bundle's own.

    Returns:
        the figures over all tasks: accept_len, speedup, speedup_transformers, tokens_per_second, lossless
        (None if that was not asked for), lossless_prompts, tree.

    Raises:
        UserError: prompts, bundle or settings are unusable, or the machine is busy and `busy` is "refuse".
    """
    out, console = Path(out), Console()
    tasks, tuning = _read_tasks(config)
    if warning := check_quiet(refuse=config.busy == "refuse"):
        console.print(f"[yellow]timings will be poor:[/] {warning}", highlight=False, soft_wrap=True)
    costs = None if calibration is None else Calibration.load(calibration)
    made = {"target": target, "device": device, "calibration": costs, "classifier": classifier}
    made["ngrams"] = ngrams
    loaded = load_bundle(bundle, dtype=dtype, **made)
    check_lengths(loaded.target, [*tasks, *([tuning] if tuning else [])], config.max_new_tokens)
    compared = first_of_each(tasks, config.lossless_prompts)
    check_lengths(loaded.target, compared, config.lossless_new_tokens)
    how, first = config.transformers_dtype, tasks[0].prompts[0].token_ids(loaded.target.tokenizer)
    stock = load_stock(loaded.target, how == "fastest" or (how == "auto" and dtype == "auto"), first, out)
    dtype = dtype_name(loaded.target.dtype)  # that "auto" resolved to
    machine = describe_machine(loaded.target.device)
    tokenizer = loaded.target.tokenizer
    depends = [loaded.target.fingerprint, tokenizer_hash(tokenizer), template_hash(tokenizer)]
    depends += [dtype, machine, versions(), stock.dtype, costs]
    for tree in config.trees or [loaded.tree]:
        with contextlib.suppress(UserError):  # one that cannot be used, which is left out below
            depends.append(costs_of(loaded, tree))  # which may be measured here again
    depends.append(weights_hash(loaded.classifier) if classifier else None)
    depends.append(content_hash(ngrams) if ngrams else None)
    key = _measured_key(config, bundle, *depends)
    log = MeasurementLog(out / "measurements.jsonl", key)
    speed = _measure_speed(config, loaded, stock.model, tasks, tuning, log)
    tree, lossless = speed["tree"], None
    made["calibration"] = loaded.calibration_for(tree)  # fp32 has to grow the trees that were timed
    transformers = stock.describe()
    del loaded, stock  # to make room for the fp32 models
    if config.lossless_prompts:
        exact = load_bundle(bundle, dtype=torch.float32, **made)
        log = MeasurementLog(out / "lossless.jsonl", fingerprint([key, tree]))
        number = sum(len(task.prompts) for task in compared)
        with counted("comparing outputs in fp32", number, "turns") as step:
            asked = compared, config.lossless_new_tokens, log, step
            lossless = check_lossless(exact.target, exact.proposer(tree), *asked)
    summary = {
        "format_version": FORMAT_VERSION,
        "max_new_tokens": config.max_new_tokens,
        "dtype": dtype,
        "transformers": transformers,
        **speed,
        "lossless": lossless,
    }
    write_json(out / "summary.json", summary)
    write_json(out / "eval.json", _for_bundle(summary))
    print_tables(summary, console)
    return _figures(summary)


def _measure_speed(
    config: EvaluateConfig,
    loaded: Bundle,
    stock: torch.nn.Module,
    tasks: Sequence[Task],
    tuning: Task | None,
    log: MeasurementLog,
) -> dict[str, Any]:
    """Return the part of the summary that is about time: the chosen tree and a row per task and method."""
    target = loaded.target
    options = {"max_new_tokens": config.max_new_tokens, "repeats": config.repeats}
    tree, trials = [*config.trees, loaded.tree][0], []
    if tuning:
        trials = try_trees(loaded, tuning, config.trees, log, **options)
        tree = max(trials, key=lambda trial: trial["tokens_per_second"])["tree"]
    methods = {
        AUTOREGRESSIVE: autoregressive(target),
        TRANSFORMERS: transformers_generate(target, model=stock),
        tree: drafting(target, loaded.proposer(tree)),
    }
    measured = measure_tasks(target, methods, tasks, log, **options)
    parts = {task.name: [m for m in measured if m.task == task.name] for task in tasks}
    rows = {name: tabulate(part) for name, part in {**parts, ALL: measured}.items()}
    return {
        "tree": tree,
        "tuning": trials,
        **conditions(target, measured),
        "tasks": {name: {method: asdict(row) for method, row in part.items()} for name, part in rows.items()},
    }


def _read_tasks(config: EvaluateConfig) -> tuple[list[Task], Task | None]:
    """Return the tasks, and the tuning prompts if there is a tree to choose."""
    if not config.prompts:
        raise UserError("evaluate.prompts: must name at least one prompt set, got none")
    config.check()
    config.check_trees()
    tasks = [Task.read(prompts) for prompts in config.prompts]
    if len(config.trees) < 2:
        return tasks, None
    tuning = Task.read(config.tune_prompts)
    return tasks, Task("(tuning)", tuning.prompts, tuning.turns)


def _measured_key(config: EvaluateConfig, bundle: str | os.PathLike, *depends: Any) -> str:
    """Return a fingerprint of all that measurements depend on: an evaluation with another one does not
    continue them."""
    sets = [*config.prompts, *([config.tune_prompts] if config.tune_prompts else [])]
    made_from = content_hash(find_drafter(bundle))
    prompts = [[item.name, content_hash(item.path)] for item in sets]
    return fingerprint([made_from, prompts, config.max_new_tokens, config.lossless_new_tokens, *depends])


def _for_bundle(summary: dict[str, Any]) -> dict[str, Any]:
    """Return what the bundle and its card carry: the drafting rows, and how they were made."""
    left_out = ("tuning", "cpu_contention", "tasks", "lossless")
    carried = {name: value for name, value in summary.items() if name not in left_out}
    carried["threads"] = summary["machine"]["threads"]
    if lossless := summary["lossless"]:
        carried["lossless"] = {name: lossless[name] for name in ("prompts", "mismatches", "dtype")}
    return carried | {"tasks": {name: part[summary["tree"]] for name, part in summary["tasks"].items()}}


def _figures(summary: dict[str, Any]) -> dict[str, Any]:
    row, lossless = summary["tasks"][ALL][summary["tree"]], summary["lossless"]
    return {name: row[name] for name in FIGURES} | {
        "lossless": lossless["mismatches"] == 0 if lossless else None,
        "lossless_prompts": lossless["prompts"] if lossless else 0,
        "tree": summary["tree"],
    }
