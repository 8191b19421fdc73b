"""Numbers of recipes and trees so large that time or memory could run out."""

import resource
import typing
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass

from drafttrain.pipeline.config import PipelineConfig, SimulateConfig
from drafttrain.reasoning.config import ReasonConfig
from drafttrain.run.options import without_none
from drafttrain.run.recipe import Recipe
from drafttrain.trees.parse import _parameters, policy_maker
from drafttrain.trees.policies import POLICIES
from tests.hostile.environments import SAME
from tests.hostile.runner import Case, nothing

LARGE = ("1000000000", "1" + 15 * "0")
ENDLESS = ("epochs", "max_steps", "repeats", "rounds")  # which may be as large as one waits
MEMORY = 6 << 30  # bytes that a command may take here
READ_BY = {  # stage -> sections that it reads
    "regenerate": ("regenerate",),
    "corpus": ("corpus",),
    "collect": ("hidden_states",),
    "train": ("drafter", "training"),
    "classifier": ("classifier",),
    "calibrate": ("calibrate",),
    "evaluate": ("evaluate",),
}


def numbers(cls: type, prefix: str = "") -> Iterator[str]:
    """Yield the keys of a settings dataclass whose values are numbers, those of nested ones too."""
    hints = typing.get_type_hints(cls)
    for item in fields(cls):
        hint, key = without_none(hints[item.name]), f"{prefix}{item.name}"
        if is_dataclass(hint):
            yield from numbers(hint, f"{key}.")
        elif hint in (int, float) and item.init:
            yield key


def limit_memory(most: int = MEMORY) -> Callable[[], None]:
    """Limit this process's memory."""
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    return nothing()


def sizes(full: str) -> Iterator[Case]:
    """Yield the cases.

    Args:
        full: the folder of a run of all stages, below the world.
    """
    classes = typing.get_type_hints(Recipe)
    for stage, sections in READ_BY.items():
        words = (
            "run",
            "{world}/full.yaml",
            "--output",
            f"{{world}}/{full}",
            "--only",
            stage,
            "--again",
            stage,
        )
        for section in sections:
            for key in numbers(without_none(classes[section]), f"{section}."):
                yield from _cases(f"run --only {stage}", words, key)
    for name, cls, words in (
        ("reason", ReasonConfig, ("reason", "{world}/reason.yaml")),
        ("simulate", SimulateConfig, ("pipeline", "--simulate", "{world}/simulate.yaml")),
        ("pipeline", PipelineConfig, ("pipeline", "{world}/pipeline.yaml", "--dry-run")),
    ):
        for key in numbers(cls):
            yield from _cases(name, (*words, "--out", "{out}/made"), key)


def trees(words: tuple[str, ...]) -> Iterator[Case]:
    """Yield a case for each setting of each tree.

    Args:
        words: of `generate` with a bundle and a calibration.
    """
    for name in POLICIES:
        for key in _parameters(policy_maker(name)):
            for value in (*LARGE, "-1", "nan", "1e400", "9" + 11 * "-9"):
                tree = f"{name}:{key}={value}"
                yield Case("generate", tree, SAME, (*words, "--tree", tree), limit_memory)


def _cases(command: str, words: tuple[str, ...], key: str) -> Iterator[Case]:
    for value in () if key.rpartition(".")[2] in ENDLESS else LARGE:
        yield Case(command, f"{key} {value}", SAME, (*words, f"--{key}={value}"), limit_memory)
