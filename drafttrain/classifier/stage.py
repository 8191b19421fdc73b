"""The classifier stage: trees of a trained drafter, and the C2T classifier that learns from them."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from drafttrain.classifier.dump import DumpConfig, dump_trees
from drafttrain.classifier.train import ClassifierConfig, train_classifier
from drafttrain.errors import UserError
from drafttrain.evaluation.prompts import PromptSet

TREES = "trees"  # folder of the labelled trees, beside the classifier


@dataclass
class ClassifierStageConfig:
    """How a drafter gets its classifier (section `classifier` of a recipe).

    Attributes:
        prompts: prompts to grow trees on; none of a benchmark, and none that the drafter was trained on.
        max_new_tokens: trees are grown behind so many tokens of each answer at most.
        top_k: expanded nodes of a layer of these trees, and children of each.
        max_depth: layers of these trees.
        features: what the classifier goes by, some of P, H, d, p, rank.
        hidden: hidden units.
        epochs: passes over the trees.
        batch_size: nodes of a step.
        negatives: rejected nodes kept for each accepted one.
        seed: of split, thinning, initial weights and order.
    """

    prompts: PromptSet | None = None
    max_new_tokens: int = 96
    top_k: int = 10
    max_depth: int = 11
    features: list[str] = field(default_factory=lambda: ["P", "H", "d"])
    hidden: int = 48
    epochs: int = 10
    batch_size: int = 1024
    negatives: float = 20.0
    seed: int = 0

    def check(self) -> None:
        """Raises:
        UserError: a value that makes no sense.
        """
        if self.prompts is None:
            return
        if self.prompts.turns != 1:
            raise UserError("classifier.prompts: turns must be 1, only first turns are decoded")
        try:
            self.dump_config().check()
            self.training_config().check()
        except UserError as error:
            raise UserError(f"classifier: {error}") from None

    def dump_config(self) -> DumpConfig:
        """How its trees are grown.

        Raises:
            UserError: no prompts.
        """
        if self.prompts is None:
            raise UserError("classifier.prompts is missing: name a file of prompts that no benchmark uses")
        return DumpConfig(self.prompts, self.max_new_tokens, self.top_k, self.max_depth, seed=self.seed)

    def training_config(self) -> ClassifierConfig:
        """How it learns from them."""
        names = ("hidden", "epochs", "batch_size", "negatives", "seed")
        return ClassifierConfig(tuple(self.features), **{name: getattr(self, name) for name in names})


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
