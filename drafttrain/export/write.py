"""The export stage: write a trained drafter as a bundle, one folder that can be published."""

import json
import os
import shutil
from pathlib import Path

import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import save_file

from drafttrain.bundle_files import CLASSIFIER, CLASSIFIER_WEIGHTS, CONFIG, LOG, WEIGHTS, read_evaluation
from drafttrain.calibration.calibration import FILE as CALIBRATION
from drafttrain.drafters.config import read_config
from drafttrain.drafters.int8 import HEAD, int8_names, with_int8
from drafttrain.drafters.weights import read_tensors
from drafttrain.export.card import missing_facts, write_card
from drafttrain.export.config import ExportConfig
from drafttrain.export.remote import remote_files
from drafttrain.kernels.machine import dtype_name
from drafttrain.self_draft.corpus_cache import DATA as NGRAM_DATA
from drafttrain.self_draft.corpus_cache import FILE as NGRAMS
from drafttrain.self_draft.corpus_cache import CorpusCache
from drafttrain.self_draft.settings import SETTINGS as SELF_DRAFT
from drafttrain.utils.disk import require_free_disk
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import require_file
from drafttrain.utils.folders import new_folder


def bundled_files(config: ExportConfig) -> list[str]:
    """Return the user's files that go into the bundle in addition to those that a run has made."""
    if config.ngrams is None:
        return []
    optional = [SELF_DRAFT] if (Path(config.ngrams) / SELF_DRAFT).exists() else []
    return [str(Path(config.ngrams) / name) for name in (NGRAMS, NGRAM_DATA, *optional)]


def export(
    config: ExportConfig,
    drafter: str | os.PathLike,
    out: str | os.PathLike,
    evaluation: str | os.PathLike | None = None,
    calibration: str | os.PathLike | None = None,
    classifier: str | os.PathLike | None = None,
) -> Path:
    """Write the bundle: weights without copies of the target's, config, training log, results, card.

    Prints which settings are still missing for publishing it.

    Args:
        drafter: folder of a trained drafter (`train` writes it as `drafter/` next to `training_log.json`).
        evaluation: `eval.json` of an evaluation of that drafter.
        calibration: folder of a calibration of that drafter.
        classifier: folder of a C2T classifier for it.

    Raises:
        UserError: no trained drafter, n-gram cache, calibration or classifier there, a damaged one, or the
            disk is full.
    """
    drafter, out = Path(drafter), Path(out)
    settings = read_config(drafter)
    if config.ngrams is not None:
        CorpusCache.open(config.ngrams, settings["target"].get("tokenizer"))
    require_file(drafter / WEIGHTS)
    try:
        tensors = read_tensors(drafter / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{drafter / WEIGHTS}: cannot be read ({error}); train the drafter again") from None
    if settings.get("head_dtype") and HEAD not in tensors:
        raise UserError(f"{drafter / WEIGHTS}: must hold {HEAD}, got none; train the drafter again")
    require_free_disk(out, sum(tensor.nbytes for tensor in tensors.values()), "the bundle")
    files = _results(drafter, evaluation, calibration, classifier) + bundled_files(config)
    with new_folder(out) as folder:
        dtype = torch.float32 if config.dtype == "float32" else torch.bfloat16
        tensors = with_int8(tensors, int8_names(tensors, settings), dtype)
        tensors = {k: v.to(dtype) if v.is_floating_point() else v for k, v in tensors.items()}
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / WEIGHTS).chmod(0o644)  # safetensors lets nobody but the owner read
        settings["dtype"] = dtype_name(dtype)
        (folder / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        for file in files:
            shutil.copyfile(file, folder / Path(file).name)
        for name, content in remote_files(None).items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        write_card(config, folder)
    if missing := missing_facts(settings, config):
        line = f"{out}: to publish it, set {missing} in the recipe"
        Console(stderr=True).print(line, style="yellow", markup=False, highlight=False, soft_wrap=True)
    return out


def _results(
    drafter: Path,
    evaluation: str | os.PathLike | None,
    calibration: str | os.PathLike | None,
    classifier: str | os.PathLike | None,
) -> list[str | os.PathLike]:
    """Return the files for the bundle that a run has made outside the drafter's folder.

    Raises:
        UserError: one of them is missing, or the evaluation is damaged.
    """
    log = drafter.parent / LOG
    files: list[str | os.PathLike] = [log] if log.exists() else []
    if evaluation is not None:
        if read_evaluation(Path(evaluation)) is None:
            raise UserError(f"{evaluation}: no such file; evaluate the drafter first")
        files.append(evaluation)
    if calibration is not None:
        files += [*Path(calibration).glob("[!.]*.png"), Path(calibration) / CALIBRATION]
    if classifier is not None:
        files += [Path(classifier) / name for name in (CLASSIFIER, CLASSIFIER_WEIGHTS)]
        files += Path(classifier).glob(f"{Path(CLASSIFIER).stem}_*")  # its report and pictures
    for file in files:
        if not Path(file).is_file():
            raise UserError(f"{file}: no such file; give a folder that drafttrain calibrate or c2t wrote")
    return files
