"""Settings of the evaluation stage. Nothing here imports torch: recipes are checked before it is loaded."""

from dataclasses import dataclass, field
from typing import Literal

from drafttrain.data.config import PromptSet
from drafttrain.trees.policies import NGRAM, WITH_NGRAMS, drafter_policy
from drafttrain.utils.errors import UserError
from drafttrain.utils.ranges import check_ranges, setting

AUTOREGRESSIVE = "autoregressive"  # our own loop without drafts
TRANSFORMERS = "transformers"  # `generate` of the same model
ALL = "all"  # the name of all tasks taken together


@dataclass
class EvaluateConfig:
    """Settings of the stage that measures a bundle (section `evaluate` of a recipe).

    Attributes:
        prompts: the prompt sets; each gets a row of the table.
        tune_prompts: prompts on which the tree is chosen; none of a benchmark's.
        trees: growth policies to try on tune_prompts, such as `chain:length=4`, `timed`, `c2t` or
            `eagle2:top_k=4,max_depth=5,total=12`; the fastest is chosen. With section `ngrams` also `ngram`,
            which drafts from n-grams alone, and `ngram+POLICY`. []: the default tree of the bundle.
        max_new_tokens: tokens decoded per chat turn at most.
        repeats: interleaved repetitions of each measurement.
        lossless_prompts: prompts decoded in fp32 to check that the output is the same. 0: none.
        lossless_new_tokens: tokens decoded per prompt for that check.
        transformers_dtype: dtype of `generate` of transformers, the baseline of speedup_transformers: "same"
            as the target's, or the one in which it is "fastest" on this CPU; "auto": "fastest" if
            target.dtype is auto, else "same".
        busy: what to do when other processes would spoil the timings.
    """

    prompts: list[PromptSet] = field(default_factory=list)
    tune_prompts: PromptSet | None = None
    trees: list[str] = field(default_factory=lambda: [f"chain:length={n}" for n in range(1, 7)])
    max_new_tokens: int = setting(96, ge=1)
    repeats: int = setting(1, ge=1)
    lossless_prompts: int = setting(16, ge=0)
    lossless_new_tokens: int = setting(96, ge=1)
    transformers_dtype: Literal["auto", "fastest", "same"] = "auto"
    busy: Literal["warn", "refuse"] = field(default="warn", metadata={"changes_output": False})

    def check(self) -> None:
        """Validate all settings but the trees.

        Raises:
            UserError: a value out of range, or there is nothing to choose the tree on.
        """
        check_ranges(self, "evaluate")
        names = [prompts.name for prompts in self.prompts]
        if len({*names, ALL}) <= len(names):
            raise UserError(
                f"evaluate.prompts: names must differ from each other and from {ALL}, got {names}"
            )
        for prompts in self.prompts:
            check_ranges(prompts, "evaluate.prompts")
        if self.tune_prompts:
            check_ranges(self.tune_prompts, "evaluate.tune_prompts")
        if self.prompts and len(self.trees) > 1 and self.tune_prompts is None:
            raise UserError(
                "evaluate.tune_prompts: must be set where evaluate.trees has several, got null; the tree is "
                "chosen there and not on the prompts that are reported"
            )

    def check_trees(self) -> None:
        """Validate the settings of the trees. This imports torch, so it is called after all other checks.

        Raises:
            UserError: there is no such policy or setting, or one that draws is joined with n-grams.
        """
        from drafttrain.trees.parse import parse_policy, takes_classifier, takes_costs

        for tree in self.trees:
            if tree == NGRAM:
                continue
            costs = stand_in = None
            if takes_costs(tree):
                from drafttrain.trees.costs import EXAMPLE_COSTS as costs
            if takes_classifier(tree):
                from drafttrain.trees.c2t import Plain

                stand_in = Plain("P")
            policy = drafter_policy(tree)
            others = WITH_NGRAMS if policy == tree else ()
            if parse_policy(policy, costs, stand_in, others).draws and policy != tree:
                raise UserError(f"tree {tree!r}: must be deterministic after ngram+, got drawn; name another")
