"""`drafttrain quickstart`: a recipe's stages, fitted to this machine and a number of minutes.

`speeds.py` measures, `budget.py` plans; here the plan becomes values of the recipe's keys. The user's own
overrides take precedence over them.
"""

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from drafttrain.data.config import PromptSet, Source
from drafttrain.kernels.machine import describe_machine
from drafttrain.run.budget import (
    LEAST_ANSWERS,
    LEAST_STEPS,
    Plan,
    Speeds,
    asked_rows,
    limit_of,
    plain_trees,
    plan,
    rows_of,
)
from drafttrain.run.recipe import Recipe, load_recipe, parse_overrides
from drafttrain.run.stages import STAGES
from drafttrain.run.target import target_model
from drafttrain.run.workflow import Workflow
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json, usable
from drafttrain.utils.locks import locked
from drafttrain.utils.writing import write_json

RECORD = "quickstart.json"  # in the run's folder: speeds and plan, from which the same command continues
OVERRUN = 1.5  # regeneration and training stop with what they have after this many times the planned time


def check(recipe: Recipe) -> None:
    """Require the keys of a recipe that the quickstart measures or falls back on.

    Raises:
        UserError: one is not set.
    """
    training, evaluation = recipe.training, recipe.evaluate
    for key, value, remedy in (
        ("training.init_from", training.init_from, "name the drafter to measure where training does not fit"),
        ("corpus.sources", recipe.corpus.sources, "name text to train on where answers do not fit"),
        ("evaluate.prompts", evaluation.prompts, "name what is to be measured"),
        ("evaluate.tune_prompts", evaluation.tune_prompts, "name prompts to choose the tree on"),
        ("evaluate.trees", evaluation.trees, "name a tree"),
    ):
        if not value:
            raise UserError(f"{key}: must be set for the quickstart, got {json.dumps(value)}; {remedy}")


def overrides_of(planned: Plan, speeds: Speeds, recipe: Recipe) -> dict[str, Any]:
    """Return a plan as values by dotted key of the recipe."""
    found = _training_overrides(planned, speeds, recipe)
    evaluation, size = recipe.evaluate, planned.evaluation
    trees = evaluation.trees if planned.calibrates else plain_trees(evaluation.trees)
    if recipe.calibrate.is_asked:
        found["calibrate"] = {"quick": planned.calibrates, "prompts": None}
    return found | {
        "evaluate.prompts": [asdict(_limited(s, size.prompts)) for s in evaluation.prompts[: size.tasks]],
        "evaluate.tune_prompts": asdict(_limited(evaluation.tune_prompts, size.tune_prompts)),
        "evaluate.trees": trees[: size.trees],
        "evaluate.max_new_tokens": size.new_tokens,
        "evaluate.lossless_prompts": size.lossless_prompts,
        "evaluate.lossless_new_tokens": size.lossless_tokens,
    }


def _training_overrides(planned: Plan, speeds: Speeds, recipe: Recipe) -> dict[str, Any]:
    if not planned.steps:
        return {"training.max_steps": 0}
    bundled = planned.conversations - planned.answers
    found = {
        "corpus.sources": [asdict(source) for source in _first_rows(recipe.corpus.sources, bundled)],
        "training.max_steps": planned.steps,
        "training.max_minutes": _minutes(planned.seconds["train"]),
        "training.eval_steps": planned.steps,  # validated once, at the end
        "training.eval_prompt_limit": planned.eval_prompts,
    }
    if not planned.answers:
        return found | {"regenerate": None}
    answered = _first_rows(recipe.regenerate.sources, planned.answers)
    return found | {
        "regenerate.sources": [asdict(source) for source in answered],
        "regenerate.batch_rows": speeds.generate_rows,
        "regenerate.max_minutes": _minutes(planned.seconds["regenerate"]),
    }


def notices_of(planned: Plan, recipe: Recipe, seconds: float) -> list[str]:
    """List what is left out of a plan and what takes its place, one line each."""
    notices, tasks = [], len(recipe.evaluate.prompts)
    if not planned.steps and recipe.training.max_steps != 0:
        why = "measuring takes the time"
        if planned.fitting:
            why = f"{planned.fitting['steps']} steps would fit, and fewer than {LEAST_STEPS} change little"
        notices.append(f"no training: {why}; {recipe.training.init_from} is measured without")
    if planned.steps and asked_rows(recipe) and not planned.answers:
        answers = planned.fitting["answers"]
        notices.append(
            f"no regeneration: {answers} answers would fit, fewer than {LEAST_ANSWERS}; the bundled answers "
            "are trained on"
        )
    if recipe.calibrate.is_asked and not planned.calibrates:
        plain = plain_trees(recipe.evaluate.trees)
        left_out = [tree for tree in recipe.evaluate.trees if tree not in plain]
        notices.append(f"no calibration, so no trees that need one: {', '.join(left_out)}")
    if planned.evaluation.tasks < tasks:
        notices.append(f"{planned.evaluation.tasks} of {tasks} tasks are measured")
    if planned.total > seconds:
        notices.append(f"the smallest run takes about {planned.total / 60:.0f} min on this machine")
    return notices


def describe(speeds: Speeds, planned: Plan, minutes: float) -> list[str]:
    """Return two lines: what was measured, and what is planned."""
    size, steps = planned.evaluation, f"{planned.steps} steps on {planned.conversations} conversations"
    parts = [
        f"{planned.answers} answers" if planned.answers else "no new answers",
        steps if planned.steps else "no training",
        *(["a short calibration"] if planned.calibrates else []),
        f"{size.prompts} prompt{'s' if size.prompts > 1 else ''} a task",
        f"{size.lossless_prompts} compared in fp32",
    ]
    return [
        f"this machine: {speeds.generate:,.0f} tokens/s generating, {speeds.collect:,.0f} collecting, "
        f"{speeds.train:,.0f} training, {speeds.decode:,.0f} decoding ({speeds.transformers:,.0f} by "
        f"transformers, {speeds.draft:,.0f} with drafts)",
        f"plan for {minutes:g} min: {', '.join(parts)}: about {planned.total / 60:.0f} min",
    ]


def quickstart(path: str, minutes: float, words: Sequence[str], begun: float) -> Path:
    """Measure the machine, fit the recipe to it and run its stages; return the bundle's folder.

    Speeds and plan are kept in the run's folder: the same command with the same minutes makes the same plan
    again, regardless of how much of it is done, and so continues where it was.

    Args:
        path: of the recipe.
        minutes: for everything, measuring included.
        words: the user's overrides, which the plan does not change.
        begun: start of the command, by `time.monotonic()`.
    """
    console, recipe = Console(), load_recipe(path, words)
    check(recipe)
    file = Path(recipe.output) / RECORD
    machine = {**describe_machine(torch.device("cpu")), "device": recipe.target.device}
    made_for = {"minutes": minutes, "target": asdict(recipe.target), "machine": machine}
    with locked(recipe.output):  # a second quickstart would disturb the first's timings and change its plan
        record = read_json(file) if file.exists() else {}
        with usable(file, "delete it, and this machine is measured again"):
            is_known = record.get("made_for") == made_for
            if is_known:
                speeds, seconds = Speeds(**record["speeds"]), float(record["seconds"])
        if not is_known:
            console.print("measuring this machine", highlight=False)
            from drafttrain.run.speeds import measure_speeds  # slow: imports what trains and decodes

            speeds = measure_speeds(recipe, target_model(recipe))
            seconds = 60 * minutes - (time.monotonic() - begun)
        planned = plan(speeds, seconds, recipe)
        for line in describe(speeds, planned, minutes):
            console.print(line, highlight=False, soft_wrap=True)
        for line in notices_of(planned, recipe, seconds):
            console.print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
        overrides = untouched(overrides_of(planned, speeds, recipe), words)
        measured = {"made_for": made_for, "speeds": asdict(speeds), "seconds": seconds}
        write_json(file, {**measured, "plan": asdict(planned), "overrides": overrides})
        texts = {key: json.dumps(value, ensure_ascii=False) for key, value in overrides.items()}
        planned_words = [word for key, text in texts.items() for word in (f"--{key}", text)]
        workflow = Workflow(load_recipe(path, [*planned_words, *words]), STAGES)
        workflow.run()
        return workflow.folder("export")


def untouched(overrides: dict[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Return the planned values of keys that the user's overrides set neither as a whole nor in part.

    Raises:
        UserError: an override belongs to a section that the plan leaves out.
    """
    keys = [key for key, _ in parse_overrides(words)]
    for key in keys:
        if (section := key.partition(".")[0]) != key and overrides.get(section, ...) is None:
            why = f"where {section} does not fit the time"
            raise UserError(f"--{key}: must be left out {why}, got it; give more --minutes")

    def is_touched(planned: str) -> bool:
        return any(f"{a}.".startswith(f"{b}.") for key in keys for a, b in ((key, planned), (planned, key)))

    found = {key: value for key, value in overrides.items() if not is_touched(key)}
    if "evaluate.trees" not in found and "calibrate" in found:
        found["calibrate"] = {**found["calibrate"], "quick": True}  # the user's trees may need it
    return found


def _first_rows(sources: Sequence[Source], n: int) -> list[Source]:
    """Return the sources of the first n rows, each limited to the rows that are taken from it."""
    found = []
    for source in sources:
        taken = min(n, rows_of([source]))
        if taken:
            found.append(dataclasses.replace(source, max_conversations=taken))
        n -= taken
    return found


def _limited(prompts: PromptSet, n: int) -> PromptSet:
    return dataclasses.replace(prompts, limit=min(n, limit_of(prompts)))


def _minutes(seconds: float) -> float:
    """Return the time limit in minutes for a stage planned to take these seconds."""
    return math.ceil(10 * OVERRUN * seconds / 60) / 10
