"""The model card of a bundle: what it is, how it was made, what it reaches, how to load it.

All of it comes out of the bundle's own files, so the card can be rendered again at any time.
"""

import math
import os
import re
from dataclasses import asdict, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from drafttrain.bundle_files import CARD, CONFIG, CONTENTS, EVALUATION, LOG, README, WEIGHTS, read_evaluation
from drafttrain.export.config import ExportConfig
from drafttrain.export.papers import papers
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json, write_json

NUMBERS = ("prompts", "accept_len", "accept_len_nonrepeated", "repetition", "tokens_per_second", "speedup")
NUMBERS += ("speedup_transformers",)  # of a task; what was not measured is null
ADDED = ("repeats", "identical")  # the same; files of earlier versions may lack these and the intervals
INTERVALS = ("speedup_interval", "speedup_transformers_interval")  # 95 % over prompts
LOGGED = ("step", "eval_loss", "eval_top1_agreement", "eval_accept_len")
METRICS = {
    "accept_len": "tokens per target forward",
    "speedup": "tokens per second over those of autoregressive decoding by the same engine",
    "identical": "share of texts identical to plain decoding",
}
CONTEXT = 256  # tokens, of the costs that the card tells
SIZES = (1, 8, 16)


def write_card(config: ExportConfig, folder: str | os.PathLike) -> None:
    """Keeps in a bundle what only the recipe knows, and writes its card."""
    kept = asdict(config)
    del kept["ngrams"]  # a path of the maker's; the n-grams themselves lie in the bundle
    write_json(Path(folder) / CARD, kept)
    (Path(folder) / README).write_text(model_card(folder), encoding="utf-8")


def read_facts(folder: str | os.PathLike) -> ExportConfig:
    """What the recipe said of a bundle: its `card.json`, or for a bundle of earlier versions what its README
    says.

    Raises:
        UserError: the file is damaged.
    """
    folder = Path(folder)
    if not (folder / CARD).exists():
        return _facts_of_readme(folder / README)
    kept = read_json(folder / CARD)
    known = {item.name for item in fields(ExportConfig)}
    if not isinstance(kept, dict) or not kept.keys() <= known:
        raise UserError(f"{folder / CARD}: holds other keys than {', '.join(sorted(known))}; export again")
    lists, texts = {"datasets", "hub_datasets", "notes"}, {"license", "language"}
    for key, value in kept.items():
        is_list = key in lists and isinstance(value, list) and all(isinstance(line, str) for line in value)
        is_text = key not in lists and isinstance(value, str)
        if not is_list and not is_text and (value is not None or key in texts):
            wanted = "a list of texts" if key in lists else "a text"
            raise UserError(f"{folder / CARD}: {key} is {value!r}; write {wanted}")
    return ExportConfig(**kept)


def model_card(folder: str | os.PathLike, repo: str | None = None) -> str:
    """Renders the card of a bundle (Markdown with the Hub's metadata in front) from the bundle alone.

    Args:
        folder: of a bundle, or of a trained drafter.
        repo: Hub id under which it will be found.

    Raises:
        UserError: no bundle there, or one of its files is damaged.
    """
    folder = Path(folder)
    settings = read_settings(folder)
    facts, evaluation = read_facts(folder), read_evaluation(folder / EVALUATION)
    _check_evaluation(folder / EVALUATION, evaluation or {})
    target, training = settings["target"], settings.get("training") or {}
    kind = drafter_kind(settings)
    present = {name: (folder / name).stat().st_size for name in CONTENTS if (folder / name).is_file()}
    name = facts.name or f"{str(target.get('name')).rstrip('/').split('/')[-1]}-{kind}"
    base_model = facts.base_model or target.get("name")
    tree, tasks = (evaluation or {}).get("tree"), (evaluation or {}).get("tasks", {})
    data = ModelCardData(
        language=facts.language,
        license=facts.license,
        library_name="drafttrain",
        tags=["speculative-decoding", kind, "drafter"],
        base_model=base_model,
        datasets=facts.hub_datasets,
        model_name=name,
        eval_results=_eval_results(tasks, (evaluation or {}).get("dtype")) or None,
    )
    return ModelCard.from_template(
        data,
        template_str=(files("drafttrain.export") / "card.md").read_text(encoding="utf-8"),
        name=name,
        kind=kind,
        repo=repo or "PATH_OR_HUB_ID",
        base_model=base_model,
        target=target,
        settings=settings,
        training=training,
        facts=facts,
        hardware=facts.hardware or _machine(training.get("machine")),
        held_out=_held_out(folder / LOG),
        evaluation=evaluation,
        evaluated_on=_machine((evaluation or {}).get("machine")),
        tasks=tasks,
        calibration=_calibration(folder / "calibration.json"),
        contents={file: text for file, text in CONTENTS.items() if file in present},
        megabytes=round(sum(present.values()) / 1e6, 1),
        weights=round(present.get(WEIGHTS, 0) / 1e6, 1),
        papers=papers(kind, tree, "classifier.json" in present, "ngrams.json" in present),
    ).content


def drafter_kind(settings: dict[str, Any]) -> str:
    """`edd` for a `config.json` whose `model_type` is `drafttrain_edd`."""
    return str(settings.get("model_type", "")).removeprefix("drafttrain_")


def read_settings(folder: Path) -> dict[str, Any]:
    """A bundle's `config.json`.

    Raises:
        UserError: there is none, or it is no drafter's.
    """
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder}: no config.json there; give the folder that `drafttrain export` wrote")
    settings = read_json(folder / CONFIG)
    is_drafter = isinstance(settings, dict) and str(settings.get("model_type", "")).startswith("drafttrain_")
    if not is_drafter or not isinstance(settings.get("target"), dict):
        raise UserError(f"{folder / CONFIG}: no drafter's; give the folder that `drafttrain export` wrote")
    return settings


def _check_evaluation(path: Path, evaluation: dict[str, Any]) -> None:
    """Refuses results that no card can tell.

    Raises:
        UserError: what is wrong with them.
    """
    tasks, tree = evaluation.get("tasks", {}), evaluation.get("tree")
    wrong = "tasks" if not isinstance(tasks, dict) else None if isinstance(tree, str | None) else "tree"
    for task, row in tasks.items() if wrong is None else ():
        for name in NUMBERS:
            value = row.get(name, "") if isinstance(row, dict) else ""
            if not _is_finite(value) and value is not None:
                wrong = wrong or f"tasks.{task}.{name}"
        for name in ADDED if wrong is None else ():
            if row.get(name) is not None and not _is_finite(row[name]):
                wrong = f"tasks.{task}.{name}"
        for name in INTERVALS if wrong is None else ():
            bounds = row.get(name) or [0.0, 0.0]
            if not (isinstance(bounds, list) and len(bounds) == 2 and all(map(_is_finite, bounds))):
                wrong = f"tasks.{task}.{name}"
    if wrong:
        raise UserError(f"{path}: {wrong} is damaged; give what drafttrain evaluate wrote")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _eval_results(tasks: dict[str, Any], dtype: str | None) -> list[EvalResult]:
    """The Hub's metadata: speed with its interval, and in which dtype how many texts were the same."""

    def describe(metric: str, row: dict[str, Any]) -> str:
        words = METRICS[metric]
        if metric == "speedup" and row.get("speedup_interval"):
            low, high = row["speedup_interval"]
            words += f" (95 % interval over prompts {low:.2f} to {high:.2f}; repeats: {row.get('repeats')})"
        return f"{words} in {dtype}" if metric == "identical" else words

    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=re.sub(r"[^\w.-]+", "-", task),  # the Hub takes nothing else
            dataset_name=task,
            metric_type=metric,
            metric_name=describe(metric, row),
            metric_value=round(row[metric], 3),
        )
        for task, row in tasks.items()
        for metric in METRICS
        if row.get(metric) is not None
    ]


def _machine(machine: dict[str, Any] | None) -> str | None:
    """A recorded machine in words."""
    if not machine:
        return None
    threads, cores, processor = (machine.get(key, "?") for key in ("threads", "cores", "processor"))
    words = f"{threads} of {cores} cores of {processor}"
    return f"{machine['gpu']}, {words}" if "gpu" in machine else words


def _calibration(path: Path) -> dict[str, Any] | None:
    """The figures of a calibration that fit a card: milliseconds of a target forward (s_t) and of a drafting
    step (s_d) by size, at one length of context, and how well the drafter's confidence fits acceptance."""
    if not path.exists():
        return None
    found = read_json(path)
    rows = {}
    try:
        for name in ("target", "drafter"):
            curve = min(found[name], key=lambda curve: abs(curve["context"] - CONTEXT))
            by_size = dict(zip(curve["sizes"], curve["median"]))
            rows[name] = [(size, 1000 * by_size[size]) for size in SIZES if size in by_size]
            rows["context"] = curve["context"]
        machine, dtype = _machine(found["machine"]), found["dtype"]
        return {**rows, "machine": machine, "dtype": dtype, "confidence": found["confidence"]["raw"]["all"]}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: damaged ({error!r}); measure it again with drafttrain calibrate") from None


def _held_out(path: Path) -> list[dict[str, Any]]:
    """What a training log says of held-out text.

    Raises:
        UserError: it is no training log.
    """
    log = read_json(path) if path.exists() else []
    if not isinstance(log, list) or not all(isinstance(entry, dict) for entry in log):
        raise UserError(f"{path}: no training log; export the drafter again")
    return [{name: entry.get(name) for name in LOGGED} for entry in log if "eval_loss" in entry]


def _facts_of_readme(path: Path) -> ExportConfig:
    """What a README of an earlier version tells of the recipe: metadata, command and data sets."""
    if not path.exists():
        return ExportConfig()
    text = path.read_text(encoding="utf-8")
    front = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    try:
        data = yaml.safe_load(front[1]) if front else {}
    except yaml.YAMLError:
        raise UserError(f"{path}: its metadata are no YAML; mend the lines between --- and ---") from None
    how = text.partition("\n## How it was made\n")[2].partition("\n## ")[0]
    command = re.search(r"^Command: `(.+)`$", how, re.MULTILINE)
    before_files = re.split(r"^- (?:`|.* optimizer steps over )", how, maxsplit=1, flags=re.MULTILINE)[0]
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    return ExportConfig(
        name=title and title[1],
        license=data.get("license", ExportConfig.license),
        base_model=data.get("base_model"),
        language=data.get("language", ExportConfig.language),
        datasets=re.findall(r"^- (.+)$", before_files, re.MULTILINE),
        hub_datasets=data.get("datasets"),
        command=command and command[1],
    )
