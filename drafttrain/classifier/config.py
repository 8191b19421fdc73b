"""Settings of labelled trees, of the C2T classifier, and of the stage that makes both."""

import math
from dataclasses import dataclass, field

from drafttrain.classifier.model import check_features
from drafttrain.data.config import PromptSet
from drafttrain.inference.sampling import SamplingParams
from drafttrain.utils.errors import UserError

ROW_BYTES = 19.2  # before compression


@dataclass
class DumpConfig:
    """How trees are grown and labelled.

    Attributes:
        prompts: prompts to decode, the first turn of each; none of a benchmark.
        max_new_tokens: trees are grown behind so many tokens of each output at most.
        top_k: expanded nodes of a layer, and children of each.
        max_depth: layers; with the default top_k a tree has 1 + 10 + 10 * 100 nodes.
        temperature: of the target's text; 0 is greedy.
        seed: of its draws.
        rows: prompts whose trees are grown at once.
    """

    prompts: PromptSet
    max_new_tokens: int = 96
    top_k: int = 10
    max_depth: int = 11
    temperature: float = 0.0
    seed: int = 0
    rows: int = 8

    def check(self) -> None:
        """Raises:
        UserError: a value that makes no sense.
        """
        for name in ("max_new_tokens", "top_k", "max_depth", "rows"):
            if getattr(self, name) < 1:
                raise UserError(f"dump-trees: {name} is {getattr(self, name)}: at least 1 is needed")
        if self.top_k > 127 or self.max_depth > 127:
            raise UserError("dump-trees: top_k and max_depth can be at most 127")
        SamplingParams(self.temperature)

    def nodes(self, draft_vocab_size: int) -> int:
        """Nodes of a tree, root excluded."""
        k = min(self.top_k, draft_vocab_size)
        layers = [k]
        for _ in range(self.max_depth - 1):
            layers.append(min(self.top_k, layers[-1]) * k)
        return sum(layers)


@dataclass
class ClassifierConfig:
    """How a classifier is trained (C2T paper, appendix B.2).

    Attributes:
        features: names of `trees.c2t.FEATURES`.
        hidden: hidden units.
        lr: learning rate. None: 1e-3, or 1e-4 when fine-tuning.
        epochs: passes over the thinned rows.
        batch_size: rows of a step.
        negatives: kept for each accepted node.
        share: of the trees that are not held out, to train on.
        threshold: at which recall and positive rate are told.
        seed: of split, thinning, initial weights and order.
    """

    features: tuple[str, ...] = ("P", "H", "d")
    hidden: int = 48
    lr: float | None = None
    epochs: int = 10
    batch_size: int = 1024
    negatives: float = 20.0
    share: float = 1.0
    threshold: float = 0.5
    seed: int = 0

    def check(self) -> None:
        """Raises:
        UserError: a value that makes no sense.
        """
        check_features(self.features)
        for name in ("hidden", "epochs", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(f"train-classifier: {name} is {getattr(self, name)}: at least 1 is needed")
        for name, low, high in (
            ("lr", 0, math.inf),
            ("negatives", 0, math.inf),
            ("share", 0, 1),
            ("threshold", 0, 1),
        ):
            value = getattr(self, name)
            if value is not None and not low < value <= high:
                within = "above 0" if high == math.inf else "above 0 and at most 1"
                raise UserError(f"train-classifier: {name} is {value}: it must be {within}")


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
