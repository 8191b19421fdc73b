"""The classifier stage: trees of a trained drafter, and the C2T classifier that learns from them."""

import os
from pathlib import Path

from drafttrain.classifier.config import ClassifierStageConfig
from drafttrain.classifier.dump import dump_trees
from drafttrain.classifier.train import train_classifier

TREES = "trees"  # folder of the labelled trees, beside the classifier


def make_classifier(
    config: ClassifierStageConfig,
    bundle: str | os.PathLike,
    out: str | os.PathLike,
    target: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
) -> dict[str, float]:
    """Writes labelled trees of a bundle's drafter, the classifier and its report into the folder `out`;
    continues an interrupted dump of trees.

    Returns:
        trees, nodes, and of the classifier on held-out trees recall and positive rate at its threshold,
        AUROC and ECE.

    Raises:
        UserError: prompts, bundle or settings are unusable, or there are too few trees to learn from.
    """
    trees = dump_trees(config.dump_config(), bundle, Path(out) / TREES, target, dtype, device)
    report = train_classifier(config.training_config(), Path(out) / TREES, out, baselines=False)
    row = report["rows"]["C2T"]["all"]
    names = ("recall", "theta", "auroc", "ece")
    return {"trees": trees["trees"], "nodes": trees["rows"], **{name: row[name] for name in names}}
