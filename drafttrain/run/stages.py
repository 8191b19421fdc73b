"""The stages of a run, in order: which settings, files and folders each one takes from the recipe.

Stages know nothing of each other and nothing of recipes; this is the one place that joins them. What each
needs is imported when it runs: it takes seconds, and a file that is missing is to be told before. The bundle
holds the evaluation's result, so the trained drafter is evaluated first and exported last.
"""

import copy
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from drafttrain.data.config import Source
from drafttrain.run.recipe import Recipe
from drafttrain.run.workflow import PREVIOUS, Stage
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json, sha256_file, write_json

if TYPE_CHECKING:
    from drafttrain.kernels.dtype import Work

Folders = dict[str, Path]


def _estimate(stage: str) -> Callable[[Recipe, Folders], dict[str, Any]]:
    """The function of `estimates.py` for a stage."""

    def estimate(recipe: Recipe, folders: Folders) -> dict[str, Any]:
        from drafttrain.run import estimates

        return getattr(estimates, stage)(recipe, folders)

    return estimate


def _stored_blocks(recipe: Recipe) -> list[int]:
    from drafttrain.run import estimates

    return estimates.stored_blocks(recipe)


def _bundled_files(recipe: Recipe) -> list[str]:
    if recipe.export.ngrams is None:
        return []
    from drafttrain.export.write import bundled_files

    return bundled_files(recipe.export)


def recorded_target(corpus: str | Path) -> str:
    """The target of the run that a corpus folder belongs to.

    Raises:
        UserError: there is no such folder, or it lies in no run.
    """
    if not (Path(corpus) / "corpus.json").is_file():
        raise UserError(f"{corpus}: no corpus here; give the folder that drafttrain corpus wrote")
    from drafttrain.run import estimates

    if (place := estimates.recorded_place(Path(corpus).parent / "target")) is None:
        raise UserError(
            f"{corpus}: lies in no run's folder that would name its target; give it with --target"
        )
    return str(place)


def target_model(recipe: Recipe) -> str:
    """What `load_target` is to load: the recipe's name, or the folder where that name can mean two."""
    from drafttrain.target_lm.fetch import fetch_target, is_known

    if is_known(recipe.target.model) and recipe.target.source == "hub":
        return str(fetch_target(recipe.target.model, "hub"))
    return recipe.target.model


def _fetch_target(recipe: Recipe, folders: Folders, out: Path) -> None:
    from drafttrain.run import estimates
    from drafttrain.target_lm.loading import resolve_target

    place = Path(resolve_target(target_model(recipe)))
    files = sorted(path for path in place.iterdir() if path.is_file()) if place.is_dir() else []
    hashes = {path.name: sha256_file(path) for path in files}
    # hidden: the cache's path on this machine is nothing that later stages depend on
    write_json(out / estimates.PLACE, {"place": str(place)})
    write_json(out / "target.json", {"model": recipe.target.model, "sha256": hashes})


def _settle_dtype(recipe: Recipe, begun: dict[str, Any], work: "Work") -> Recipe:
    """The recipe with the dtype that `target.dtype: auto` comes to: that of an unfinished attempt, else the
    fastest here."""
    settled, target = copy.copy(recipe), recipe.target
    dtype = target.dtype
    if dtype == "auto":
        dtype = begun.get("target", {}).get("dtype", "auto")
    if dtype == "auto":
        from drafttrain.target_lm.loading import choose_dtype
        from drafttrain.utils.machine import dtype_name

        dtype = dtype_name(choose_dtype(target_model(recipe), "auto", target.device, work))
    settled.target = dataclasses.replace(target, dtype=dtype)
    return settled


def _settle_products(recipe: Recipe, begun: dict[str, Any]) -> Recipe:
    return _settle_dtype(recipe, begun, "products")


def _settle_decoding(recipe: Recipe, begun: dict[str, Any]) -> Recipe:
    return _settle_dtype(recipe, begun, "decoding")


def _settle_evaluation(recipe: Recipe, begun: dict[str, Any]) -> Recipe:
    """The target's dtype, and whether transformers has another one."""
    settled, how = _settle_decoding(recipe, begun), recipe.evaluate.transformers_dtype
    if how == "auto":
        how = "fastest" if recipe.target.dtype == "auto" else "same"
    settled.evaluate = dataclasses.replace(recipe.evaluate, transformers_dtype=how)
    return settled


def _follow_float32(section: Any, recipe: Recipe) -> Any:
    """A section with its `dtype: auto` settled: float32 where target.dtype is, as bf16 files would round."""
    dtype = "float32" if recipe.target.dtype == "float32" else "bfloat16"
    return dataclasses.replace(section, dtype=dtype) if section.dtype == "auto" else section


def _settle_collection(recipe: Recipe, begun: dict[str, Any]) -> Recipe:
    settled = _settle_products(recipe, begun)
    settled.hidden_states = _follow_float32(recipe.hidden_states, recipe)
    return settled


def _settle_export(recipe: Recipe, begun: dict[str, Any]) -> Recipe:
    settled = copy.copy(recipe)
    settled.export = _follow_float32(recipe.export, recipe)
    return settled


def _settle_regeneration(recipe: Recipe, begun: dict[str, Any]) -> Recipe:
    """A server has a dtype of its own."""
    return recipe if recipe.regenerate.server else _settle_products(recipe, begun)


def _settle_training(recipe: Recipe, begun: dict[str, Any]) -> Recipe:
    """The target's dtype, and whether the drafter computes in bf16."""
    settled, bf16 = _settle_products(recipe, begun), recipe.training.bf16
    if bf16 == "auto":
        bf16 = begun.get("training", {}).get("bf16", "auto")
    if bf16 == "auto":
        bf16 = settled.target.dtype != "float32"
    settled.training = dataclasses.replace(recipe.training, bf16=bf16)
    return settled


def _regenerate(recipe: Recipe, folders: Folders, out: Path) -> Any:
    from drafttrain.regenerate.stage import regenerate

    earlier = sorted((out.parent / PREVIOUS).glob(f"{out.name}-*"))
    return regenerate(
        recipe.regenerate,
        target_model(recipe),
        out,
        dtype=recipe.target.dtype,
        device=recipe.target.device,
        earlier=earlier,
    )


def _corpus(recipe: Recipe, folders: Folders, out: Path) -> dict[str, Any]:
    from drafttrain.data.build import build_corpus
    from drafttrain.target_lm.loading import load_tokenizer

    config = recipe.corpus
    if "regenerate" in folders:
        regenerated = folders["regenerate"] / "responses.jsonl"
        if regenerated.stat().st_size:  # it is empty where time was up before the first answer
            config = dataclasses.replace(config, sources=[Source(str(regenerated)), *config.sources])
        elif not config.sources:
            raise UserError(
                "corpus.sources: must not be empty where regenerate finished no answer in its time; add a "
                "source, or raise regenerate.max_minutes"
            )
    report = build_corpus(config, load_tokenizer(target_model(recipe)), out)
    return {"train": dataclasses.asdict(report.train), "validation": dataclasses.asdict(report.validation)}


def _collect(recipe: Recipe, folders: Folders, out: Path) -> Any:
    from drafttrain.hidden_states.collect import collect

    return collect(
        recipe.hidden_states,
        target_model(recipe),
        _stored_blocks(recipe),
        folders["corpus"],
        out,
        dtype=recipe.target.dtype,
        device=recipe.target.device,
    )


def _train(recipe: Recipe, folders: Folders, out: Path) -> None:
    from drafttrain.training.train import take_drafter, train

    if not _is_trained(recipe):
        take_drafter(recipe.training.init_from, out)
        return
    train(
        recipe.training,
        recipe.drafter,
        target_model(recipe),
        folders["corpus"],
        out,
        hidden_states=folders.get("collect"),
        target_dtype=recipe.target.dtype,
        target_device=recipe.target.device,
        command=recipe.command,
    )


def _training_figures(out: Path) -> dict[str, Any]:
    if not (out / "training_log.json").exists():  # a drafter that was taken without training
        return {"train_tokens": 0}
    summary = read_json(out / "drafter" / "config.json")["training"]
    speed = summary["tokens"] / max(summary["seconds"], 1e-9)
    return {"train_tokens": summary["tokens"], "train_tokens_per_second": round(speed, 1)}


def _classifier(recipe: Recipe, folders: Folders, out: Path) -> dict[str, float]:
    from drafttrain.run.c2t import make_classifier

    return make_classifier(
        recipe.classifier,
        folders["train"] / "drafter",
        out,
        target=target_model(recipe),
        dtype=recipe.target.dtype,
        device=recipe.target.device,
    )


def _made_classifier(folders: Folders) -> Path | None:
    """The folder of the run's classifier; None where none is asked for or the drafter was too weak."""
    from drafttrain.classifier.model import FILE as CLASSIFIER

    folder = folders.get("classifier")
    return folder if folder and (folder / CLASSIFIER).exists() else None


def _calibrate(recipe: Recipe, folders: Folders, out: Path) -> None:
    from drafttrain.run.calibrate import calibrate

    calibrate(
        recipe.calibrate,
        folders["train"] / "drafter",
        out,
        target=target_model(recipe),
        dtype=recipe.target.dtype,
        device=recipe.target.device,
        classifier=_made_classifier(folders),
    )


def _evaluate(recipe: Recipe, folders: Folders, out: Path) -> Any:
    from drafttrain.evaluation.evaluate import evaluate
    from drafttrain.trees.parse import takes_classifier

    config, classifier = recipe.evaluate, _made_classifier(folders)
    if classifier is None and _has_classifier(recipe):
        trees = [tree for tree in config.trees if not takes_classifier(tree)]
        config = dataclasses.replace(config, trees=trees)  # none: the bundle's own
    return evaluate(
        config,
        folders["train"] / "drafter",
        out,
        target=target_model(recipe),
        dtype=recipe.target.dtype,
        device=recipe.target.device,
        calibration=folders.get("calibrate"),
        classifier=classifier,
    )


def _show_evaluation(out: Path) -> None:
    from drafttrain.evaluation.report import print_tables

    print_tables(read_json(out / "summary.json"), Console())


def _export(recipe: Recipe, folders: Folders, out: Path) -> None:
    from drafttrain.export.write import export

    config = dataclasses.replace(recipe.export, name=recipe.export.name or recipe.name)
    evaluation = folders["evaluate"] / "eval.json" if "evaluate" in folders else None
    made = folders.get("calibrate"), _made_classifier(folders)
    export(config, folders["train"] / "drafter", out, evaluation, *made)


def _is_trained(recipe: Recipe) -> bool:
    return recipe.training.max_steps != 0


def _is_offline(recipe: Recipe) -> bool:
    return recipe.hidden_states.mode == "offline" and _is_trained(recipe)


def _trained_on(recipe: Recipe) -> list[str]:
    return [*(["corpus"] if _is_trained(recipe) else []), *(["collect"] if _is_offline(recipe) else [])]


def _has_classifier(recipe: Recipe) -> bool:
    return recipe.classifier.prompts is not None


def _classified(recipe: Recipe) -> list[str]:
    return ["classifier"] if _has_classifier(recipe) else []


def _is_calibrated(recipe: Recipe) -> bool:
    return recipe.calibrate.is_asked


def _calibration(recipe: Recipe) -> list[str]:
    return ["calibrate"] if _is_calibrated(recipe) else []


def _is_evaluated(recipe: Recipe) -> bool:
    return bool(recipe.evaluate.prompts)


def _evaluation_files(recipe: Recipe) -> list[str]:
    tuning = recipe.evaluate.tune_prompts
    return [prompts.path for prompts in [*recipe.evaluate.prompts, *([tuning] if tuning else [])]]


def _training_files(recipe: Recipe) -> list[str]:
    model = recipe.drafter.model  # a Hub id is no file, but what is written as a path has to be there
    local = model and (Path(model).exists() or model.startswith((".", "/")))
    return _paths(recipe.training.eval_prompts, recipe.training.init_from, model if local else None)


def _paths(*paths: str | None) -> list[str]:
    return [path for path in paths if path]


STAGES = [
    Stage(
        name="fetch-target",
        folder="target",
        run=_fetch_target,
        section=lambda recipe: {"target": {"model": recipe.target.model, "source": recipe.target.source}},
        files=lambda recipe: _paths(recipe.target.model) if Path(recipe.target.model).exists() else [],
        estimate=_estimate("fetch_target"),
    ),
    Stage(
        name="regenerate",
        folder="regenerated",
        run=_regenerate,
        section=lambda recipe: {"target": recipe.target, "regenerate": recipe.regenerate},
        settle=_settle_regeneration,
        needs=lambda recipe: ["fetch-target"],
        files=lambda recipe: [source.path for source in recipe.regenerate.sources],
        enabled=lambda recipe: recipe.regenerate is not None and _is_trained(recipe),
        resumes=True,
        keep=True,
        shared=True,
        estimate=_estimate("regenerate"),
    ),
    Stage(
        name="corpus",
        folder="corpus",
        run=_corpus,
        section=lambda recipe: {"corpus": recipe.corpus},
        needs=lambda recipe: ["fetch-target", *(["regenerate"] if recipe.regenerate else [])],
        files=lambda recipe: [*(source.path for source in recipe.corpus.sources), *recipe.corpus.exclude],
        enabled=_is_trained,
        shared=True,
        estimate=_estimate("corpus"),
    ),
    Stage(
        name="collect",
        folder="hidden_states",
        run=_collect,
        section=lambda recipe: {
            "target": recipe.target,
            "hidden_states": recipe.hidden_states,
            "drafter": {"tapped_blocks": _stored_blocks(recipe)},
        },
        settle=_settle_collection,
        needs=lambda recipe: ["fetch-target", "corpus"],
        enabled=_is_offline,
        resumes=True,
        ranks=True,
        shared=True,
        estimate=_estimate("collect"),
    ),
    Stage(
        name="train",
        folder="drafter",
        run=_train,
        section=lambda recipe: {
            "target": recipe.target,
            "drafter": recipe.drafter,
            "training": recipe.training,
        },
        settle=_settle_training,
        needs=lambda recipe: ["fetch-target", *_trained_on(recipe)],
        files=_training_files,
        resumes=True,
        keep=True,
        ranks=True,
        figures=_training_figures,
        summary=("train_tokens", "train_tokens_per_second"),
        estimate=_estimate("train"),
    ),
    Stage(
        name="classifier",
        folder="classifier",
        run=_classifier,
        section=lambda recipe: {"target": recipe.target, "classifier": recipe.classifier},
        settle=_settle_decoding,
        needs=lambda recipe: ["fetch-target", "train"],
        files=lambda recipe: [recipe.classifier.prompts.path],
        enabled=_has_classifier,
        resumes=True,
        estimate=_estimate("classifier"),
    ),
    Stage(
        name="calibrate",
        folder="calibration",
        run=_calibrate,
        section=lambda recipe: {
            "target": recipe.target,
            "device": recipe.target.device,  # the output of this stage is speed, too
            "calibrate": recipe.calibrate,
        },
        settle=_settle_decoding,
        needs=lambda recipe: ["fetch-target", "train", *_classified(recipe)],
        files=lambda recipe: [] if recipe.calibrate.quick else [recipe.calibrate.prompts.path],
        enabled=_is_calibrated,
        estimate=_estimate("calibrate"),
    ),
    Stage(
        name="evaluate",
        folder="evaluation",
        run=_evaluate,
        section=lambda recipe: {
            "target": recipe.target,
            "device": recipe.target.device,  # the output of this stage is speed
            "evaluate": recipe.evaluate,
        },
        settle=_settle_evaluation,
        needs=lambda recipe: ["fetch-target", "train", *_classified(recipe), *_calibration(recipe)],
        files=_evaluation_files,
        enabled=_is_evaluated,
        resumes=True,
        summary=(
            "accept_len",
            "speedup",
            "speedup_transformers",
            "tokens_per_second",
            "lossless",
            "lossless_prompts",
            "tree",
            "teacher_tokens_per_second",
        ),
        show=_show_evaluation,
        estimate=_estimate("evaluate"),
    ),
    Stage(
        name="export",
        folder="bundle",
        run=_export,
        section=lambda recipe: {"export": recipe.export},
        settle=_settle_export,
        files=_bundled_files,
        needs=lambda recipe: [
            "fetch-target",
            "train",
            *_classified(recipe),
            *_calibration(recipe),
            *(["evaluate"] if _is_evaluated(recipe) else []),
        ],
        estimate=_estimate("export"),
    ),
]
