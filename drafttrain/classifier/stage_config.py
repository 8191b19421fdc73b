"""Settings of the stage that grows labelled trees and trains the C2T classifier on them."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from drafttrain.data.config import PromptSet
from drafttrain.utils.errors import UserError
from drafttrain.utils.ranges import check_ranges, setting

if TYPE_CHECKING:
    from drafttrain.classifier.config import ClassifierConfig, DumpConfig


@dataclass
class ClassifierStageConfig:
    """How C2T's classifier of a drafter is trained (section `classifier` of a recipe).

    Attributes:
        prompts: prompts to grow trees on; none of a benchmark, and none that the drafter was trained on.
        max_new_tokens: trees are grown after at most this many tokens of each answer.
        top_k: nodes expanded per layer of these trees, and children of each.
        max_depth: layers of these trees.
        features: what the classifier reads, some of P, H, d, p, rank.
        hidden: hidden units.
        epochs: passes over the trees.
        batch_size: nodes per training step.
        negatives: rejected nodes kept for each accepted one.
        seed: seed of the split, the rejected nodes kept, the initial weights and the order.
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
    seed: int = setting(0, ge=0)

    def check(self) -> None:
        """Validate the settings, if there are prompts.

        Raises:
            UserError: a value is out of range.
        """
        if self.prompts is None:
            return
        check_ranges(self.prompts, "classifier.prompts")
        if self.prompts.turns != 1:
            raise UserError(
                f"classifier.prompts: turns must be 1, got {self.prompts.turns}; only first turns are decoded"
            )
        self.dump_config().check("classifier")
        self.training_config().check("classifier")

    def dump_config(self) -> "DumpConfig":
        """Return how the trees are grown and labelled.

        Raises:
            UserError: no prompts.
        """
        if self.prompts is None:
            raise UserError("classifier.prompts: must be set, got null; name prompts that no benchmark uses")
        from drafttrain.classifier.config import DumpConfig  # only recipes with a classifier need it

        return DumpConfig(self.prompts, self.max_new_tokens, self.top_k, self.max_depth, seed=self.seed)

    def training_config(self) -> "ClassifierConfig":
        """Return how the classifier is trained on them."""
        from drafttrain.classifier.config import ClassifierConfig

        names = ("hidden", "epochs", "batch_size", "negatives", "seed")
        return ClassifierConfig(tuple(self.features), **{name: getattr(self, name) for name in names})
