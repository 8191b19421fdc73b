"""The classifier stage: trees of a trained drafter, and the C2T classifier that learns from them."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from drafttrain.bundle import find_bundle, load_bundle
from drafttrain.bundle_files import CONFIG, WEIGHTS
from drafttrain.classifier.config import ClassifierConfig, DumpConfig
from drafttrain.classifier.data import NothingToLearn
from drafttrain.classifier.dump import finished_shards, write_trees
from drafttrain.classifier.stage_config import ClassifierStageConfig
from drafttrain.classifier.train import train_classifier
from drafttrain.data.prompts import read_prompts
from drafttrain.kernels.machine import dtype_name
from drafttrain.report.pictures import draw_classifier
from drafttrain.trees.interface import LARGEST
from drafttrain.utils.errors import UserError
from drafttrain.utils.provenance import content_hash, files_hash

TREES = "trees"  # folder of the labelled trees, in that of the classifier


def dump_trees(
    config: DumpConfig,
    bundle: str | os.PathLike,
    out: str | os.PathLike,
    target: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
) -> dict[str, Any]:
    """Write labelled trees of a bundle's drafter into the folder `out`; continue an interrupted dump.

    Returns:
        the folder's `trees.json`.

    Raises:
        UserError: prompts, bundle or settings are unusable, or `out` holds trees made from other inputs.
    """
    config.check()
    prompts = read_prompts(config.prompts.path, config.prompts.limit)
    folder = find_bundle(bundle)
    loaded = load_bundle(folder, target=target, dtype=dtype, device=device, own_classifier=False)
    settings = {name: value for name, value in asdict(config).items() if name not in ("prompts", "rows")}
    in_one_file = (folder / WEIGHTS).exists()  # a small LM's weights may be in several
    made_from = {
        "drafter": files_hash(folder, (CONFIG, WEIGHTS)) if in_one_file else loaded.fingerprints["drafter"],
        "prompts": content_hash(config.prompts.path),
        "target": loaded.target.fingerprint,
        "dtype": dtype_name(loaded.target.dtype),
        **settings,
    }
    if config.temperature == 0:
        del made_from["seed"]  # nothing is drawn
    shards = finished_shards(Path(out), made_from)
    reach = loaded.drafter.max_depth
    if reach is not None and config.max_depth > reach:
        raise UserError(
            f"max_depth: must be <= {reach}, as deep as the drafter {bundle} drafts, got {config.max_depth}"
        )
    if (nodes := config.nodes(loaded.drafter.draft_vocab_size)) > LARGEST:  # masks grow with their square
        raise UserError(
            f"top_k: must grow trees of at most {LARGEST} nodes, got {nodes} with {config.top_k} and "
            f"max_depth {config.max_depth}; lower one of them"
        )
    ids = [prompt.token_ids(loaded.target.tokenizer) for prompt in prompts]
    for prompt, tokens in zip(prompts, ids):
        loaded.target.check_length(
            tokens, config.max_new_tokens + config.max_depth, f"{config.prompts.path}: prompt {prompt.id}"
        )
    return write_trees(config, loaded.target, loaded.drafter, ids, Path(out), made_from, shards)


def make_classifier(
    config: ClassifierStageConfig,
    bundle: str | os.PathLike,
    out: str | os.PathLike,
    target: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
) -> dict[str, float]:
    """Write labelled trees of a bundle's drafter, a classifier and its report into the folder `out`; continue
    an interrupted dump. If the drafter is too weak to learn from, print a line and make no classifier.

    Returns:
        number of trees and nodes, and recall and positive rate (theta) at the classifier's threshold, AUROC
        and ECE on held-out trees.

    Raises:
        UserError: prompts, bundle or settings are unusable.
    """
    trees = dump_trees(config.dump_config(), bundle, Path(out) / TREES, target, dtype, device)
    figures = {"trees": trees["trees"], "nodes": trees["rows"]}
    try:
        report = train(config.training_config(), Path(out) / TREES, out, baselines=False)
    except NothingToLearn as error:
        Console().print(f"no classifier: {error}", style="yellow", markup=False, soft_wrap=True)
        return figures
    row = report["rows"]["C2T"]["all"]
    return figures | {name: row[name] for name in ("recall", "theta", "auroc", "ece")}


def train(
    config: ClassifierConfig, trees: str | os.PathLike, out: str | os.PathLike, **options: Any
) -> dict[str, Any]:
    """Train a classifier on labelled trees and draw its report; options and errors of `train_classifier`."""
    report = train_classifier(config, trees, out, **options)
    draw_classifier(out)
    return report
