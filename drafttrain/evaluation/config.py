"""Settings of the evaluation stage and of benchmarks.

Nothing here imports torch, so that `drafttrain benchmark --help` answers at once.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from drafttrain.data.config import HUB, PromptSet
from drafttrain.inference.params import SamplingParams
from drafttrain.utils.errors import UserError
from drafttrain.utils.ranges import check_ranges, setting

AUTOREGRESSIVE = "autoregressive"  # our own loop without drafts
TRANSFORMERS = "transformers"  # `generate` of the same model
ALL = "all"  # the task that stands for all tasks together
PROMPT_LOOKUP, LOOKAHEAD, SELF_DRAFT = "prompt_lookup", "lookahead", "self_draft"
WITHOUT_FILES = (PROMPT_LOOKUP, LOOKAHEAD, SELF_DRAFT)
ASSISTANT = "assistant"  # `generate` of transformers with a small causal LM


@dataclass
class EvaluateConfig:
    """Settings of the stage that measures a bundle (section `evaluate` of a recipe).

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
    max_new_tokens: int = setting(96, ge=1)
    repeats: int = setting(1, ge=1)
    lossless_prompts: int = setting(16, ge=0)
    lossless_new_tokens: int = setting(96, ge=1)
    transformers_dtype: Literal["auto", "fastest", "same"] = field(default="auto", metadata={"settled": True})
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
        """Validate the settings of the trees; imports torch, so a recipe's other mistakes come first.

        Raises:
            UserError: there is no such policy or setting.
        """
        from drafttrain.trees.c2t import Plain
        from drafttrain.trees.costs import EXAMPLE_COSTS
        from drafttrain.trees.parse import parse_policy

        for tree in self.trees:
            parse_policy(tree, EXAMPLE_COSTS, Plain("P"))


@dataclass(frozen=True)
class MethodSpec:
    """A method as the command line names it.

    Attributes:
        name: in the tables.
        source: folder or Hub id of a bundle, or of the model of `assistant`; None for those without files.
        tree: growth policy, as `parse_policy` reads it. None: what the bundle recommends.
    """

    name: str
    source: str | None = None
    tree: str | None = None

    @classmethod
    def parse(cls, text: str) -> "MethodSpec":
        """Read [NAME=]BUNDLE[@TREE], assistant=MODEL or one of `WITHOUT_FILES`.

        Raises:
            UserError: it is none of these.
        """
        if text.strip() in WITHOUT_FILES:
            return cls(text.strip())
        source, tree = text, None
        if "@" in text and not Path(text.partition("=")[2] or text).exists():
            source, tree = (part.strip() for part in text.rsplit("@", 1))
        name, source = _named(source)
        if not name or not source or tree == "":
            raise UserError(
                f"--method: must be [NAME=]BUNDLE[@TREE], {ASSISTANT}=MODEL, or one of "
                f"{', '.join(WITHOUT_FILES)}, got {text}"
            )
        if name in (AUTOREGRESSIVE, TRANSFORMERS):
            raise UserError(f"--method: {name} is always measured, got {text}; choose another name")
        if name in WITHOUT_FILES:
            raise UserError(f"--method: {name} takes no files, got {text}; choose another name for a bundle")
        if name == ASSISTANT and tree is not None:
            raise UserError(
                f"--method: {ASSISTANT} drafts as transformers does, got {text}; leave out @{tree}"
            )
        return cls(name, source, tree)


@dataclass(frozen=True)
class TaskSpec:
    """A task as the command line names it: a name, and a file, folder, archive or `hub:` data set."""

    name: str
    source: str

    @classmethod
    def parse(cls, text: str) -> "TaskSpec":
        """Read [NAME=]FILE.

        Raises:
            UserError: it is something else.
        """
        name, source = _named(text)
        if not name or not source or name == ALL or "/" in name:
            raise UserError(
                f"--task: must be [NAME=]FILE or [NAME=]{HUB}org/dataset with a name without / and other "
                f"than {ALL}, got {text}"
            )
        return cls(name, source)


def _named(text: str) -> tuple[str, str]:
    """Name and source of NAME=SOURCE; a path, a file or a Hub id alone is called by its last part."""
    name, equals, source = (part.strip() for part in text.partition("="))
    if equals or not ("/" in text or Path(text).exists()):
        return name, source
    return Path(name).name.partition(".")[0], name


@dataclass
class BenchmarkConfig:
    """Settings of a benchmark without a recipe: methods, and tasks to compare them on.

    Attributes:
        target: what `load_target` takes.
        methods: beside plain decoding by us and by transformers, which are always measured.
        tasks: prompt sets.
        limit: prompts per task or group of it, evenly spaced. None: all.
        turns: turns of each chat at most.
        temperatures: each is measured by itself; 0 is greedy.
        repeats: interleaved repetitions.
        max_new_tokens: tokens decoded per turn at most.
        seed: of the draws at temperatures above 0.
        dtype: of target and drafters, as `load_target` takes it. With "auto" `generate` of transformers runs
            in the dtype in which it is fastest on this CPU, else in the same.
        device: as `load_target` takes it.
        skip_long: leave out turns that do not fit the target.
        busy: what to do on a busy machine.
    """

    target: str
    methods: list[MethodSpec]
    tasks: list[TaskSpec]
    limit: int | None = setting(None, ge=1)
    turns: int = setting(2, ge=1)
    temperatures: list[float] = field(default_factory=lambda: [0.0])
    repeats: int = setting(3, ge=1)
    max_new_tokens: int = setting(96, ge=1)
    seed: int = 0
    dtype: str = "auto"
    device: str = "auto"
    skip_long: bool = False
    busy: Literal["warn", "refuse"] = "warn"

    def check(self) -> None:
        """Validate all settings.

        Raises:
            UserError: a value out of range, or a name given twice.
        """
        check_ranges(self)
        for what, named in (("method", self.methods), ("task", self.tasks)):
            names = [item.name for item in named]
            if twice := sorted({name for name in names if names.count(name) > 1}):
                raise UserError(f"--{what}: each name must be given once, got {twice[0]} twice; rename one")
        if not self.tasks:
            raise UserError("--task: must name at least one, got none")
        if len(set(self.temperatures)) < len(self.temperatures) or not self.temperatures:
            raise UserError(f"--temperature: must be given once each, got {self.temperatures}")
        for temperature in self.temperatures:
            SamplingParams(temperature)
