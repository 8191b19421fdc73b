"""Settings of labelled trees and of the C2T classifier."""

from dataclasses import dataclass

from drafttrain.data.config import PromptSet
from drafttrain.trees.features import check_features
from drafttrain.utils.ranges import check_ranges, setting

ROW_BYTES = 19.2  # of a node in a dump, before compression


@dataclass
class DumpConfig:
    """How trees are grown and labelled.

    Attributes:
        prompts: prompts to decode, the first turn of each; none of a benchmark.
        max_new_tokens: most tokens of an answer to grow trees after.
        top_k: nodes expanded per layer, and children of each.
        max_depth: layers of a tree.
        temperature: of the target's text; 0 is greedy.
        seed: seed of the draws.
        rows: prompts whose trees are grown in one batch.
    """

    prompts: PromptSet
    max_new_tokens: int = setting(96, ge=1)
    top_k: int = setting(10, ge=1, le=127)
    max_depth: int = setting(11, ge=1, le=127)
    temperature: float = setting(0.0, ge=0)
    seed: int = setting(0, ge=0)
    rows: int = setting(8, ge=1)

    def check(self, section: str = "") -> None:
        """Validate the settings; errors name `section` of the recipe.

        Raises:
            UserError: a value out of range.
        """
        check_ranges(self, section)

    def nodes(self, draft_vocab_size: int) -> int:
        """Return the number of nodes of a tree, root excluded."""
        k = min(self.top_k, draft_vocab_size)
        layers = [k]
        for _ in range(self.max_depth - 1):
            layers.append(min(self.top_k, layers[-1]) * k)
        return sum(layers)


@dataclass
class ClassifierConfig:
    """How a classifier is trained (C2T paper, appendix B.2).

    Attributes:
        features: what the classifier reads, some of P, H, d, p, rank.
        hidden: hidden units.
        lr: learning rate. None: 1e-3, fine-tuning 1e-4.
        epochs: passes over the nodes.
        batch_size: nodes per training step.
        negatives: rejected nodes kept per accepted one.
        share: share of the trees to train on.
        threshold: decision threshold for the reported recall and positive rate.
        seed: of split, sampling, weights and order.
    """

    features: tuple[str, ...] = ("P", "H", "d")
    hidden: int = setting(48, ge=1, le=1 << 14)
    lr: float | None = setting(None, gt=0)
    epochs: int = setting(10, ge=1)
    batch_size: int = setting(1024, ge=1)
    negatives: float = setting(20.0, gt=0)
    share: float = setting(1.0, gt=0, le=1)
    threshold: float = setting(0.5, gt=0, le=1)
    seed: int = setting(0, ge=0)

    def check(self, section: str = "") -> None:
        """Validate the settings; errors name `section` of the recipe.

        Raises:
            UserError: a value out of range.
        """
        check_features(self.features, section)
        check_ranges(self, section)
