"""The stages of a run, in order: which settings, files and folders each one takes from the recipe.

Stages know nothing of each other and nothing of recipes; this is the one place that joins them. What each
needs is imported when it runs: that takes seconds, and a missing file is to be reported before. The bundle
holds the evaluation's result, so the trained drafter is evaluated first and exported last.
"""

import copy
import dataclasses
import os
import warnings
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from drafttrain.bundle_files import CLASSIFIER
from drafttrain.calibration.config import CalibrateConfig
from drafttrain.data.config import PromptSet, Source
from drafttrain.drafters.config import FILES, DrafterConfig, kind_of, read_config
from drafttrain.run.recipe import Recipe
from drafttrain.run.target import PLACE, target_model
from drafttrain.run.workflow import PREVIOUS, Stage
from drafttrain.trees.policies import NGRAM
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json
from drafttrain.utils.hashes import sha256_file
from drafttrain.utils.writing import write_json

if TYPE_CHECKING:
    from drafttrain.kernels.dtype import Work

Folders = dict[str, Path]
CORPUS = "corpus"  # folder of the stage corpus
ANSWERS = "regenerated"  # of the stage regenerate
NGRAMS = "ngrams"  # of the stage ngrams
NOT_OF_A_MODEL = "*.yaml", "*.yml", "*.jsonl", "*.jsonl.gz", "*.html", "*.log"  # recipes, chats and the like


def stored_blocks(recipe: Recipe) -> list[int]:
    """Return the blocks whose outputs a store holds in addition to the final states: those that the drafter
    taps, unless the recipe names others."""
    if recipe.hidden_states.tapped_blocks is not None:
        return recipe.hidden_states.tapped_blocks
    shape = drafter_shape(recipe)
    return shape.tapped_blocks if "tapped_blocks" in shape.settings else []


def drafter_shape(recipe: Recipe) -> DrafterConfig:
    """Return the drafter's shape: that of `training.init_from` where there is one."""
    if not recipe.training.init_from:
        return recipe.drafter
    stored = read_config(recipe.training.init_from)
    shape = DrafterConfig(kind=kind_of(stored))
    names = [name for name in ("draft_vocab_size", *shape.settings) if name in stored]
    shape = dataclasses.replace(shape, **{name: stored[name] for name in names})
    if "kv_heads" in shape.settings:
        shape = dataclasses.replace(shape, kv_heads=stored.get("num_key_value_heads"))
    if "anchor" in shape.settings:
        anchor = shape.anchor or recipe.drafter.anchor
        shape = dataclasses.replace(shape, anchor=anchor, layers=max(shape.layers, recipe.drafter.layers))
    if "head_dtype" in shape.settings and recipe.training.max_steps != 0:
        own = {name: getattr(recipe.drafter, name) for name in ("head_dtype", "layers_dtype")}
        shape = dataclasses.replace(shape, **own)
    if "model" in shape.settings:  # adapters it once had are merged, and it is trained whole
        shape = dataclasses.replace(shape, model=recipe.training.init_from, lora_rank=None)
    grown = recipe.training.init_draft_vocab_size
    return shape if grown is None else dataclasses.replace(shape, draft_vocab_size=grown)


def _place(recipe: Recipe) -> dict[str, str]:
    return {"dtype": recipe.target.dtype, "device": recipe.target.device}


def settle(recipe: Recipe, begun: dict[str, Any], work: "Work | None" = None) -> Recipe:
    """Return the recipe with every "auto" that depends on the machine replaced by its value in a stage.

    Args:
        begun: settings of an unfinished attempt, whose dtypes are kept.
        work: kind of work that the target does in the stage, which decides its fastest dtype. None: none.
    """
    settled, target = copy.copy(recipe), recipe.target
    if work is not None:
        dtype = target.dtype
        if dtype == "auto":
            dtype = begun.get("target", {}).get("dtype", "auto")
        if dtype == "auto":
            from drafttrain.kernels.machine import dtype_name
            from drafttrain.target_lm.loading import choose_dtype

            dtype = dtype_name(choose_dtype(target_model(recipe), "auto", target.device, work))
        settled.target = dataclasses.replace(target, dtype=dtype)
    bf16 = recipe.training.bf16
    if bf16 == "auto":
        bf16 = begun.get("training", {}).get("bf16", "auto")
    bf16 = settled.target.dtype == "bfloat16" if bf16 == "auto" else bf16
    settled.training = dataclasses.replace(recipe.training, bf16=bf16)
    return settled


def _settle_regeneration(recipe: Recipe, begun: dict[str, Any]) -> Recipe:
    """Settle the recipe, unless a server answers: it chooses its dtype itself."""
    return recipe if recipe.regenerate.server else settle(recipe, begun, "products")


def _fetch_target(recipe: Recipe, folders: Folders, out: Path) -> None:
    from drafttrain.drafters.check import SUPPORTED_TARGETS
    from drafttrain.target_lm.loading import load_config, resolve_target

    place = Path(resolve_target(target_model(recipe)))
    file = place / "config.json"
    settings = read_json(file) if place.is_dir() else {"model_type": load_config(str(place)).model_type}
    if not isinstance(settings, dict) or not isinstance(kind := settings.get("model_type"), str):
        raise UserError(f"{file}: must hold a model_type; give a folder that save_pretrained wrote")
    if _is_trained(recipe) and "model" not in recipe.drafter.settings and kind not in SUPPORTED_TARGETS:
        known = ", ".join(SUPPORTED_TARGETS)  # training refuses it, after hours of answers and states
        warnings.warn(f"target.model: must be one of {known} to train a drafter, got {kind}", stacklevel=2)
    files = _model_files(place) if place.is_dir() else []
    hashes = {path.name: sha256_file(path) for path in files}
    # a hidden file, which is not hashed: later stages do not depend on where the target is on this machine
    write_json(out / PLACE, {"place": str(place)})
    write_json(out / "target.json", {"model": recipe.target.model, "sha256": hashes})


def _regenerate(recipe: Recipe, folders: Folders, out: Path) -> Any:
    from drafttrain.regenerate.stage import KeptStates, regenerate

    earlier = sorted((out.parent / PREVIOUS).glob(f"{out.name}-*"))
    config, model, kept = recipe.hidden_states, target_model(recipe), None
    if recipe.regenerate.keep_states and config.mode == "offline":
        limits = 1e9 * config.max_disk_gb, config.shard_tokens
        kept = KeptStates(stored_blocks(recipe), config.dtype, *limits)
    given = {"earlier": earlier, "kept": kept, "is_own": True}  # the run resumes nothing else
    # checked before hours are spent
    given |= {"exclude": recipe.corpus.exclude, "measured": measured_prompts(recipe)}
    return regenerate(recipe.regenerate, model, out, **_place(recipe), **given)


def _corpus(recipe: Recipe, folders: Folders, out: Path) -> dict[str, Any]:
    from drafttrain.data.build import build_corpus
    from drafttrain.target_lm.loading import load_tokenizer

    config = dataclasses.replace(recipe.corpus, sources=corpus_sources(recipe, folders))
    report = build_corpus(config, load_tokenizer(target_model(recipe)), out, measured_prompts(recipe))
    if not report.validation.examples:  # training refuses it, after hours of states
        raise UserError(
            f"corpus.validation_fraction: must leave a validation split, got none of {report.train.examples} "
            "examples; split the text into several documents"
        )
    return {"train": dataclasses.asdict(report.train), "validation": dataclasses.asdict(report.validation)}


def corpus_sources(recipe: Recipe, folders: Folders) -> list[Source]:
    """Return the sources of the corpus, the target's answers of this run first.

    Raises:
        UserError: there are none.
    """
    given = recipe.corpus.sources
    if "regenerate" in folders:
        regenerated = folders["regenerate"] / "responses.jsonl"
        # it is empty where time was up before the first answer, and may be gone once it has been used
        if not regenerated.exists() or regenerated.stat().st_size:
            return [Source(str(regenerated)), *given]
        if not given:
            raise UserError(
                "corpus.sources: must not be empty where regenerate finished no answer in its time; add a "
                "source, or raise regenerate.max_minutes"
            )
    return given


def _ngrams(recipe: Recipe, folders: Folders, out: Path) -> dict[str, int]:
    from drafttrain.run.ngrams import make_ngrams

    return make_ngrams(recipe, folders, out)


def measured_prompts(recipe: Recipe) -> list[PromptSet]:
    """Return the prompt sets that the drafter is measured on, except those whose files do not exist yet."""
    return [prompts for prompts in recipe.evaluate.prompts if Path(prompts.path).exists()]


def _check_measured(recipe: Recipe, corpus: Path) -> None:
    """Check that the corpus holds none of the measured prompts that were added after it was built."""
    if not (measured := measured_prompts(recipe)):
        return
    from drafttrain.data.measured import not_compared

    if new := not_compared(corpus, measured):
        from drafttrain.data.build import check_measured
        from drafttrain.target_lm.loading import load_tokenizer

        check_measured(corpus, load_tokenizer(target_model(recipe)), new)


def _collect(recipe: Recipe, folders: Folders, out: Path) -> Any:
    from drafttrain.hidden_states.collect import collect
    from drafttrain.hidden_states.recording import states_folder

    _check_measured(recipe, folders["corpus"])
    # used if they exist; not among `needs`, because their absence is no reason to collect again
    recorded = [states_folder(out.parent / ANSWERS)]
    config, model, blocks = recipe.hidden_states, target_model(recipe), stored_blocks(recipe)
    return collect(config, model, blocks, folders["corpus"], out, **_place(recipe), recorded=recorded)


def _train(recipe: Recipe, folders: Folders, out: Path) -> dict[str, Any]:
    if not _is_trained(recipe):
        from drafttrain.training.taken import take_drafter

        take_drafter(recipe.training.init_from, out)
        return {"train_tokens": 0}
    from drafttrain.training.train import train

    _check_measured(recipe, folders["corpus"])
    folder = train(
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
    summary = read_json(folder / "config.json")["training"]
    speed = summary["tokens"] / max(summary["seconds"], 1e-9)
    return {"train_tokens": summary["tokens"], "train_tokens_per_second": round(speed, 1)}


def _classifier(recipe: Recipe, folders: Folders, out: Path) -> dict[str, float]:
    from drafttrain.run.c2t import make_classifier

    target = target_model(recipe)
    return make_classifier(recipe.classifier, folders["train"] / "drafter", out, target, **_place(recipe))


def _made_classifier(folders: Folders) -> Path | None:
    """Return the folder of the run's classifier; None where none is asked for or the drafter was too weak."""
    folder = folders.get("classifier")
    return folder if folder and (folder / CLASSIFIER).exists() else None


def _calibrate(recipe: Recipe, folders: Folders, out: Path) -> None:
    from drafttrain.run.calibrate import calibrate

    options = {"target": target_model(recipe), "classifier": _made_classifier(folders)}
    calibrate(recipe.calibrate, folders["train"] / "drafter", out, **options, **_place(recipe))


def _evaluate(recipe: Recipe, folders: Folders, out: Path) -> Any:
    from drafttrain.evaluation.evaluate import evaluate
    from drafttrain.trees.parse import takes_classifier

    if _is_trained(recipe) and (out.parent / CORPUS).exists():
        _check_measured(recipe, out.parent / CORPUS)
    if recipe.ngrams is not None and (out.parent / NGRAMS).exists() and measured_prompts(recipe):
        from drafttrain.run.ngrams import check_ngrams

        check_ngrams(
            recipe, out.parent, {"regenerate": out.parent / ANSWERS} if _is_regenerated(recipe) else {}
        )
    config, classifier = recipe.evaluate, _made_classifier(folders)
    if classifier is None and _has_classifier(recipe):
        trees = [tree for tree in config.trees if not takes_classifier(tree)]
        config = dataclasses.replace(config, trees=trees)  # none: the bundle's own
    made = {"calibration": folders.get("calibrate"), "classifier": classifier}
    made["ngrams"] = folders.get(NGRAMS)
    drafter, target = folders["train"] / "drafter", target_model(recipe)
    return evaluate(config, drafter, out, target, **made, **_place(recipe))


def _show_evaluation(out: Path) -> None:
    from drafttrain.evaluation.report import print_tables

    print_tables(read_json(out / "summary.json"), Console())


def _export(recipe: Recipe, folders: Folders, out: Path) -> None:
    from drafttrain.export.write import export

    config = dataclasses.replace(recipe.export, name=recipe.export.name or recipe.name)
    if "ngrams" in folders:
        config.ngrams = str(folders["ngrams"])
    evaluation = folders["evaluate"] / "eval.json" if "evaluate" in folders else None
    made = folders.get("calibrate"), _made_classifier(folders)
    export(config, folders["train"] / "drafter", out, evaluation, *made)


def _bundled_files(recipe: Recipe) -> list[str]:
    if recipe.export.ngrams is None:
        return []
    from drafttrain.export.write import bundled_files

    return bundled_files(recipe.export)


def _is_trained(recipe: Recipe) -> bool:
    return recipe.training.max_steps != 0


def _is_regenerated(recipe: Recipe) -> bool:
    return recipe.regenerate is not None and _is_trained(recipe)


def _has_classifier(recipe: Recipe) -> bool:
    return recipe.classifier.prompts is not None


def _evaluation_files(recipe: Recipe) -> list[str]:
    tuning = recipe.evaluate.tune_prompts
    return [prompts.path for prompts in [*recipe.evaluate.prompts, *([tuning] if tuning else [])]]


def _training_files(recipe: Recipe) -> list[str]:
    model, start = recipe.drafter.model, recipe.training.init_from
    paths = [recipe.training.eval_prompts] if recipe.training.eval_prompts else []
    if start:  # a calibration that is written there later changes nothing
        paths += [str(Path(start) / name) for name in FILES]
    # a Hub id is no file, but what is written as a path has to be there
    return paths + (_local(model) or ([model] if model and model.startswith((".", "/")) else []))


def _ngram_files(recipe: Recipe) -> list[str]:
    given, tuning = recipe.ngrams, recipe.calibrate.prompts
    sources = [source.path for source in given.sources or recipe.corpus.sources]
    return [*sources, *(given.exclude or recipe.corpus.exclude), *([tuning.path] if tuning else [])]


def _local(model: str | None) -> list[str]:
    """Return the folder or file of a model; none for a Hub id or a known name."""
    path = Path(os.path.expanduser(model or ""))  # that of `Path` raises for an unknown user
    return [str(path)] if model and path.exists() else []


def _ngram_section(recipe: Recipe) -> dict[str, Any]:
    section = {"target": recipe.target, "ngrams": recipe.ngrams, "prompts": recipe.calibrate.prompts}
    section["corpus"] = {"sources": recipe.corpus.sources}
    if recipe.calibrate.max_new_tokens != CalibrateConfig.max_new_tokens:  # records once had none
        section["max_new_tokens"] = recipe.calibrate.max_new_tokens
    return section


def _target_files(model: str) -> list[str]:
    """Return the files of a target in a folder, or its single file; none for a Hub id or a known name."""
    folder = Path(os.path.expanduser(model))
    return [str(file) for file in _model_files(folder)] if folder.is_dir() else _local(model)


def _model_files(folder: Path) -> list[Path]:
    """Return the files of a model's folder, without those that a user who works in it keeps there."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return [file for file in files if not any(file.match(pattern) for pattern in NOT_OF_A_MODEL)]


STAGES = [
    Stage(
        name="fetch-target",
        folder="target",
        run=_fetch_target,
        section=lambda recipe: {"target": {"model": recipe.target.model, "source": recipe.target.source}},
        files=lambda recipe: _target_files(recipe.target.model),
    ),
    Stage(
        name="regenerate",
        folder=ANSWERS,
        run=_regenerate,
        section=lambda recipe: {"target": recipe.target, "regenerate": recipe.regenerate},
        settle=_settle_regeneration,
        needs=("fetch-target",),
        files=lambda recipe: [source.path for source in recipe.regenerate.sources],
        enabled=_is_regenerated,
        resumes=True,
        keep=True,
        shared=True,
        appends=True,
    ),
    Stage(
        name="corpus",
        folder=CORPUS,
        run=_corpus,
        section=lambda recipe: {"corpus": recipe.corpus},
        needs=("fetch-target", "regenerate"),
        files=lambda recipe: [*(source.path for source in recipe.corpus.sources), *recipe.corpus.exclude],
        enabled=_is_trained,
        shared=True,
        described_in=("corpus.json",),
    ),
    Stage(
        name="collect",
        folder="hidden_states",
        run=_collect,
        section=lambda recipe: {
            "target": recipe.target,
            "hidden_states": recipe.hidden_states,
            "drafter": {"tapped_blocks": stored_blocks(recipe)},
        },
        settle=partial(settle, work="products"),
        needs=("fetch-target", "corpus"),
        enabled=lambda recipe: recipe.hidden_states.mode == "offline" and _is_trained(recipe),
        resumes=True,
        ranks=True,
        shared=True,
    ),
    Stage(
        name="train",
        folder="drafter",
        run=_train,
        section=lambda recipe: {name: getattr(recipe, name) for name in ("target", "drafter", "training")},
        settle=partial(settle, work="products"),
        needs=("fetch-target", "corpus", "collect"),
        files=_training_files,
        resumes=True,
        keep=True,
        ranks=True,
        summary=("train_tokens", "train_tokens_per_second"),
    ),
    Stage(
        name="classifier",
        folder="classifier",
        run=_classifier,
        section=lambda recipe: {"target": recipe.target, "classifier": recipe.classifier},
        settle=partial(settle, work="decoding"),
        needs=("fetch-target", "train"),
        files=lambda recipe: [recipe.classifier.prompts.path],
        enabled=_has_classifier,
        resumes=True,
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
        settle=partial(settle, work="decoding"),
        needs=("fetch-target", "train", "classifier"),
        files=lambda recipe: [] if recipe.calibrate.quick else [recipe.calibrate.prompts.path],
        enabled=lambda recipe: recipe.calibrate.is_asked,
    ),
    Stage(
        name="ngrams",
        folder=NGRAMS,
        run=_ngrams,
        section=_ngram_section,
        settle=partial(settle, work="decoding"),
        needs=("fetch-target", "regenerate"),
        files=_ngram_files,
        enabled=lambda recipe: recipe.ngrams is not None,
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
        settle=partial(settle, work="decoding"),
        needs=("fetch-target", "train", "classifier", "calibrate", "ngrams"),
        uses=lambda recipe, name: name != NGRAMS or any(NGRAM in tree for tree in recipe.evaluate.trees),
        files=_evaluation_files,
        enabled=lambda recipe: bool(recipe.evaluate.prompts),
        resumes=True,
        summary=(
            "accept_len",
            "speedup",
            "speedup_transformers",
            "tokens_per_second",
            "lossless",
            "lossless_prompts",
            "tree",
        ),
        show=_show_evaluation,
    ),
    Stage(
        name="export",
        folder="bundle",
        run=_export,
        section=lambda recipe: {"export": recipe.export, "name": recipe.name},
        files=_bundled_files,
        needs=("fetch-target", "train", "classifier", "calibrate", "ngrams", "evaluate"),
    ),
]
