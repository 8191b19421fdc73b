"""The model card of a bundle, rendered from the bundle's own files alone, so at any time."""

import os
import re
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args, get_type_hints

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from jinja2 import Template, UndefinedError

from drafttrain.bundle_files import CARD, CONFIG, EVALUATION, LOG, README, WEIGHTS, read_evaluation
from drafttrain.calibration.calibration import CONTEXT, Calibration
from drafttrain.calibration.calibration import FILE as CALIBRATION
from drafttrain.export.config import ExportConfig
from drafttrain.hub import CONTENTS
from drafttrain.utils.errors import UserError, brief
from drafttrain.utils.files import read_json
from drafttrain.utils.shares import below_all
from drafttrain.utils.types import fits
from drafttrain.utils.writing import write_json, write_text

# numbers of a task; all but `prompts` are null, or missing, where they were not measured
NUMBERS = ("prompts", "accept_len", "accept_len_nonrepeated", "repetition", "tokens_per_second", "speedup")
NUMBERS += ("speedup_transformers", "repeats", "identical")
INTERVALS = ("accept_len_interval", "speedup_interval", "speedup_transformers_interval")  # 95 % over prompts
LOGGED = ("step", "eval_loss", "eval_top1_agreement", "eval_accept_len")
METRICS = {
    "accept_len": "tokens per target forward",
    "speedup": "tokens per second over those of autoregressive decoding by the same engine",
    "identical": "share of texts identical to plain decoding",
}
SIZES = (1, 8, 16)
SPECULATIVE, SELF_DRAFT = "speculative_decoding", "self_draft"  # keys in papers.bib
PAPER_OF_DRAFTER = {"edd": "edd_pct", "vdm": SPECULATIVE, "causal_lm": SPECULATIVE}
PAPER_OF_DRAFTER |= {"eagle": "eagle", "medusa": "medusa"}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
PAPER_OF_TREE = {"pct": "edd_pct", "eagle2": "eagle2", "c2t": "c2t", "c2t_chain": "c2t", "ngram": SELF_DRAFT}


def write_card(config: ExportConfig, folder: str | os.PathLike) -> None:
    """Write `card.json`, the recipe's facts that no other file of the bundle has, and the card."""
    facts = asdict(config)
    del facts["ngrams"], facts["dtype"]  # a path on the maker's machine, and what config.json has
    write_json(Path(folder) / CARD, facts)
    write_text(Path(folder) / README, model_card(folder))


def read_facts(folder: str | os.PathLike) -> ExportConfig:
    """Read a bundle's `card.json`; the defaults where there is none.

    Raises:
        UserError: the file is damaged.
    """
    path = Path(folder) / CARD
    facts, hints = read_json(path) if path.exists() else {}, get_type_hints(ExportConfig)
    if not isinstance(facts, dict) or not facts.keys() <= hints.keys():
        raise UserError(f"{path}: must have no other keys than {', '.join(hints)}; export the drafter again")
    for key, value in facts.items():
        if not fits(value, hints[key]):
            wanted = "a list of texts" if list[str] in get_args(hints[key]) else "a text"
            raise UserError(f"{path}: {key}: must be {wanted}, got {value!r}")
    return ExportConfig(**facts)


def missing_facts(settings: dict[str, Any], facts: ExportConfig) -> str | None:
    """Return in words which settings a published card needs and a bundle lacks; None if it lacks nothing.

    Args:
        settings: the bundle's `config.json`.
        facts: its `card.json`.
    """
    name, missing = str(settings["target"].get("name")), []
    base_model = facts.base_model or ("" if is_path(name) else name)
    if not is_hub_id(base_model):
        missing.append(f"export.base_model (the target's Hub id user/name, got {facts.base_model or name})")
    if not facts.license:
        missing.append("export.license (the weights' licence as the Hub spells it, got none)")
    return " and ".join(missing) or None


def is_hub_id(name: str) -> bool:
    """Return whether this is a name of the form user/name that the Hub accepts."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return HUB_ID.fullmatch(name) is not None


def is_path(name: str) -> bool:
    """Return whether a target's name is a path on this machine, even if it looks like a Hub id."""
    is_file = name.lower().endswith(".gguf") or Path(name).exists()
    return is_file or name.startswith((".", "/", "~")) or name.count("/") > 1


def model_card(folder: str | os.PathLike, repo: str | None = None) -> str:
    """Render the card of a bundle: Markdown after the Hub's metadata.

    Args:
        folder: of a bundle, or of a trained drafter.
        repo: Hub id under which it will be found.

    Raises:
        UserError: no bundle there, or one of its files is damaged.
    """
    try:
        return _card(Path(folder), repo)
    except (TypeError, AttributeError, UndefinedError) as error:  # of values that only the template reads
        raise UserError(
            f"{folder}: {CONFIG} or {EVALUATION} holds a value of the wrong type ({brief(error)}); export it "
            "again"
        ) from None


def _card(folder: Path, repo: str | None) -> str:
    settings, facts = read_settings(folder), read_facts(folder)
    evaluation = _read_results(folder / EVALUATION)
    target, training = settings["target"], settings.get("training") or {}
    tasks, kind = evaluation.get("tasks", {}), drafter_kind(settings)
    present = {name: (folder / name).stat().st_size for name in CONTENTS if (folder / name).is_file()}
    name = facts.name or f"{str(target.get('name')).rstrip('/').split('/')[-1]}-{kind}"
    base_model = facts.base_model or target.get("name")
    data = ModelCardData(
        language=facts.language,
        license=facts.license,
        library_name="drafttrain",
        tags=["speculative-decoding", kind, "drafter"],
        base_model=base_model,
        datasets=facts.hub_datasets,
        model_name=name,
        eval_results=_eval_results(tasks, evaluation.get("dtype")) or None,
    )
    values = data.to_dict() | dict(
        name=name,
        kind=kind,
        repo=repo or "PATH_OR_HUB_ID",
        published=repo is not None,  # else transformers has to be given the drafter's folder
        base_model=base_model,
        target=target,
        target_by_path=repo is None and is_path(str(target.get("name"))),  # push writes base_model there
        settings=settings,
        training=training,
        facts=facts,
        command=facts.command or training.get("command"),
        hardware=facts.hardware or _machine(training.get("machine")),
        held_out=_held_out(folder / LOG),
        evaluation=evaluation,
        evaluated_on=_machine(evaluation.get("machine")),
        tasks=tasks,
        calibration=_calibration(folder),
        contents={file: text for file, text in CONTENTS.items() if file in present},
        megabytes=round(sum(present.values()) / 1e6, 1),
        weights=round(present.get(WEIGHTS, 0) / 1e6, 1),
        papers=_papers(kind, evaluation.get("tree"), present),
        below_all=below_all,
    )
    return ModelCard(_template().render(card_data=data.to_yaml(), **values)).content


@cache
def _template() -> Template:
    """Compile the card's template; `ModelCard.from_template` would do so for every card."""
    return Template(_resource("card.md"))


def drafter_kind(settings: dict[str, Any]) -> str:
    """Return `edd` for a `config.json` whose `model_type` is `drafttrain_edd`."""
    return str(settings.get("model_type", "")).removeprefix("drafttrain_")


def read_settings(folder: Path) -> dict[str, Any]:
    """Read a bundle's `config.json`.

    Raises:
        UserError: there is none, or it is not a drafter's.
    """
    if not (folder / CONFIG).is_file():
        raise UserError(f"{folder}: no config.json there; give the folder that `drafttrain export` wrote")
    settings = read_json(folder / CONFIG)
    is_drafter = isinstance(settings, dict) and str(settings.get("model_type", "")).startswith("drafttrain_")
    if not is_drafter or not isinstance(settings.get("target"), dict):
        raise UserError(
            f"{folder / CONFIG}: must be a drafter's; give the folder that `drafttrain export` wrote"
        )
    return settings


def _read_results(path: Path) -> dict[str, Any]:
    """Read an evaluation, empty where there is none.

    Raises:
        UserError: a value is missing or of a type that no card can show.
    """
    evaluation = read_evaluation(path) or {}
    tasks = evaluation.get("tasks", {})
    wrong = [] if isinstance(tasks, dict) else [("tasks", "an object", tasks)]
    for task, row in tasks.items() if not wrong else ():
        row = row if isinstance(row, dict) else {}
        for name in NUMBERS:
            if not fits(row.get(name), float) and (row.get(name) is not None or name == "prompts"):
                wrong.append((f"tasks.{task}.{name}", "a finite number", row.get(name)))
        for name in INTERVALS:
            bounds = row.get(name) or [0, 0]
            if not (fits(bounds, list[float]) and len(bounds) == 2):
                wrong.append((f"tasks.{task}.{name}", "two finite numbers", bounds))
    if wrong:
        key, constraint, value = wrong[0]
        raise UserError(
            f"{path}: {key}: must be {constraint}, got {value!r}; give what drafttrain benchmark RECIPE wrote"
        )
    return evaluation


def _eval_results(tasks: dict[str, Any], dtype: str | None) -> list[EvalResult]:
    """Return the Hub's metadata: accept_len and speed with their intervals, and the share of identical texts
    with its dtype."""

    def describe(metric: str, row: dict[str, Any]) -> str:
        words = METRICS[metric]
        if bounds := row.get(f"{metric}_interval"):  # earlier evaluations have none of accept_len
            repeats = f"; repeats: {row.get('repeats')}" if metric == "speedup" else ""
            words += f" (95 % interval over prompts {bounds[0]:.2f} to {bounds[1]:.2f}{repeats})"
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
    """Describe a recorded machine in words."""
    if not machine:
        return None
    threads, cores, processor = (machine.get(key, "?") for key in ("threads", "cores", "processor"))
    words = f"{threads} of {cores} cores of {processor}"
    return f"{machine['gpu']}, {words}" if "gpu" in machine else words


def _calibration(folder: Path) -> dict[str, Any] | None:
    """Return machine, dtype and confidence of a calibration and, at one context length, milliseconds of a
    target forward and of a draft step by size; None if there is none.

    Raises:
        UserError: the file is damaged.
    """
    if not (folder / CALIBRATION).exists():
        return None
    made, rows = Calibration.load(folder), {}
    for name in ("target", "drafter"):
        curve = min(getattr(made, name), key=lambda curve: abs(curve.context - CONTEXT))
        by_size = dict(zip(curve.sizes, curve.median))
        rows[name] = [(size, 1000 * by_size[size]) for size in SIZES if size in by_size]
        rows["context"] = curve.context
    made_on, confidence = _machine(made.machine), made.confidence["raw"]["all"]
    return {**rows, "machine": made_on, "dtype": made.dtype, "confidence": confidence}


def _held_out(path: Path) -> list[dict[str, Any]]:
    """Return the entries of a training log that were measured on held-out text.

    Raises:
        UserError: it is not a training log.
    """
    log = read_json(path) if path.exists() else []
    if not isinstance(log, list) or not all(isinstance(entry, dict) for entry in log):
        raise UserError(f"{path}: must be a list of log entries; export the drafter again")
    entries = [{name: entry.get(name) for name in LOGGED} for entry in log if "eval_loss" in entry]
    for name, value in (pair for entry in entries for pair in entry.items()):
        if not isinstance(value, int | float | None):  # a loss that diverged is NaN
            raise UserError(f"{path}: {name}: must be a number, got {value!r}; export the drafter again")
    return entries


def _papers(kind: str, tree: str | None, present: dict[str, int]) -> list[str]:
    """Return BibTeX entries: the drafter's paper, its tree's, and those of the bundle's other files."""
    entries = {
        re.match(r"@\w+{(\w+)", text)[1]: text for text in _resource("papers.bib").strip().split("\n\n")
    }
    keys = [PAPER_OF_DRAFTER.get(kind)]
    keys += [PAPER_OF_TREE.get(part.partition(":")[0]) for part in (tree or "").split("+")]
    keys += [
        "c2t" if "classifier.json" in present else None,
        SELF_DRAFT if "ngrams.json" in present else None,
    ]
    return [entries[key] for key in dict.fromkeys(keys) if key]


def _resource(name: str) -> str:
    return (files("drafttrain.export") / name).read_text(encoding="utf-8")
