"""Settings of a benchmark without a recipe: methods and tasks as the command line names them.

Nothing here imports torch, so that `drafttrain benchmark --help` answers at once.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from drafttrain.data.config import HUB
from drafttrain.evaluation.config import ALL, AUTOREGRESSIVE, TRANSFORMERS
from drafttrain.inference.params import SamplingParams
from drafttrain.utils.errors import UserError
from drafttrain.utils.ranges import check_ranges, setting

PROMPT_LOOKUP, LOOKAHEAD, SELF_DRAFT = "prompt_lookup", "lookahead", "self_draft"
WITHOUT_FILES = (PROMPT_LOOKUP, LOOKAHEAD, SELF_DRAFT)
ASSISTANT = "assistant"  # `generate` of transformers with a small causal LM


@dataclass(frozen=True)
class MethodSpec:
    """A method as the command line names it.

    Attributes:
        name: its name in the tables.
        source: folder or Hub id of a bundle, or of the model of `assistant`; None for those without files.
        tree: growth policy, `ngram` or `ngram+POLICY`. None: the bundle's tree.
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
        text = text.strip()
        is_file = not ("=" in text or "/" in text or text.startswith(HUB))  # of the working directory
        name, source = (text.partition(".")[0], text) if is_file else _named(text)
        if not name or not source or name == ALL or "/" in name:
            raise UserError(
                f"--task: must be [NAME=]FILE or [NAME=]{HUB}org/dataset with a name without / and other "
                f"than {ALL}, got {text}"
            )
        return cls(name, source)


def _named(text: str) -> tuple[str, str]:
    """Return name and source of NAME=SOURCE; a path or Hub id alone is named after its last part, up to the
    first dot."""
    name, equals, source = (part.strip() for part in text.partition("="))
    if equals or not ("/" in text or Path(text).exists()):
        return name, source
    return Path(name).name.partition(".")[0], name


@dataclass
class BenchmarkConfig:
    """Settings of a benchmark without a recipe: methods, and tasks to compare them on.

    Attributes:
        target: what `load_target` takes.
        methods: in addition to plain decoding by us and by transformers, which are always measured.
        tasks: prompt sets.
        limit: prompts per task or group of it, evenly spaced. None: all.
        turns: turns of each chat at most.
        temperatures: measured one after the other; 0 is greedy.
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
