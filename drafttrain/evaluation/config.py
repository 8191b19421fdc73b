"""Settings of the evaluation stage."""

from dataclasses import dataclass, field
from typing import Literal

from drafttrain.data.config import PromptSet
from drafttrain.evaluation.metrics import ALL
from drafttrain.trees.c2t import Plain
from drafttrain.trees.costs import EXAMPLE_COSTS
from drafttrain.trees.parse import parse_policy
from drafttrain.utils.errors import UserError


@dataclass
class EvaluateConfig:
    """What a bundle is measured on (section `evaluate` of a recipe).

    Attributes:
        prompts: the prompt sets; each gets a row of the table.
        tune_prompts: prompts on which the tree is chosen; none of a benchmark.
        trees: growth policies to try on them, such as `chain:length=4`, `eagle2:top_k=4,max_depth=5,total=12`
            `timed` or `c2t`; the fastest is used. Empty: what the bundle recommends.
        max_new_tokens: tokens decoded per chat turn at most.
        repeats: interleaved repetitions of each measurement.
        lossless_prompts: prompts decoded in fp32 to prove that the output is the same. 0: none.
        lossless_new_tokens: tokens decoded per prompt there.
        transformers_dtype: of `generate` of transformers, which speed is compared with: "same" as the
            target's, or the one in which it is "fastest" on this CPU; "auto": "fastest" if target.dtype is
            auto, else "same".
        busy: what to do when other processes would spoil the timings.
    """

    prompts: list[PromptSet] = field(default_factory=list)
    tune_prompts: PromptSet | None = None
    trees: list[str] = field(default_factory=lambda: [f"chain:length={n}" for n in range(1, 7)])
    max_new_tokens: int = 96
    repeats: int = 1
    lossless_prompts: int = 16
    lossless_new_tokens: int = 96
    transformers_dtype: Literal["auto", "fastest", "same"] = field(default="auto", metadata={"settled": True})
    busy: Literal["warn", "refuse"] = field(default="warn", metadata={"changes_output": False})

    def check(self) -> None:
        """Raises:
        UserError: a value that makes no sense, or there is nothing to choose the tree on.
        """
        for name, least in (
            ("max_new_tokens", 1),
            ("repeats", 1),
            ("lossless_prompts", 0),
            ("lossless_new_tokens", 1),
        ):
            if getattr(self, name) < least:
                raise UserError(f"evaluate.{name} is {getattr(self, name)}: at least {least} is needed")
        for tree in self.trees:
            parse_policy(tree, EXAMPLE_COSTS, Plain("P"))  # only the settings are looked at
        names = [prompts.name for prompts in self.prompts]
        if len({*names, ALL}) <= len(names):
            raise UserError(f"evaluate.prompts: the names {names} must differ from each other and from {ALL}")
        for prompts in [*self.prompts, *([self.tune_prompts] if self.tune_prompts else [])]:
            if prompts.turns < 1 or (prompts.limit is not None and prompts.limit < 1):
                raise UserError(f"evaluate: limit and turns of {prompts.name} must be at least 1")
        if self.prompts and len(self.trees) > 1 and self.tune_prompts is None:
            raise UserError(
                "evaluate.tune_prompts is missing: the tree is chosen there, not on the prompts that are "
                "reported; name a file, or give a single tree"
            )
