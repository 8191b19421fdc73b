"""Commands that run the stages of a recipe: the arguments of each, and what it does with them.

A command's docstring is its text in the help. Slow modules are imported inside the command that needs them,
so that `drafttrain --help` answers at once.
"""

import argparse
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from drafttrain.run.options import given, option, refuse, require, whole
from drafttrain.utils.errors import UserError

PLAN = "again", "dry_run"  # options of the commands that run stages
TARGET = "known name, folder, .gguf file or Hub id"


@contextmanager
def importing() -> Iterator[None]:
    """Pause the garbage collector while modules are imported, and keep it from looking through them later.

    torch and transformers make a million objects that stay; searching them for garbage takes a fifth of the
    time of their import, and half of the time in which a target is loaded after it.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def run_options(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser, "RECIPE")
    option(parser, "--from STAGE", "leave earlier stages unchanged", dest="first")
    option(parser, "--until STAGE", "leave later stages unchanged", dest="last")
    option(parser, "--only STAGE", "leave all other stages unchanged")
    option(parser, "--again STAGE", "repeat a stage that is up to date; repeatable", action="append")
    add_plan(parser)


def run(args: argparse.Namespace) -> None:
    """Run all stages of a recipe, skipping what is up to date."""
    _run_stages(args, **given(args, "first", "last", "only", "again"))


def stage_options(parser: argparse.ArgumentParser, recipe: str = "RECIPE") -> None:
    _add_recipe(parser, recipe)
    option(parser, "--again", "repeat it where it is up to date")
    add_plan(parser)


collect_options = train_options = stage_options


def collect(args: argparse.Namespace) -> None:
    """Store the target's hidden states, to train offline."""
    run_stage(args, "collect")


def train(args: argparse.Namespace) -> None:
    """Train the drafter."""
    run_stage(args, "train")


def regenerate_options(parser: argparse.ArgumentParser) -> None:
    stage_options(parser, "[RECIPE]")
    group = parser.add_argument_group("without a recipe, the target writes prompts itself")
    option(group, "--self-prompts N", "prompts to sample", type=whole)
    option(group, "--target MODEL", TARGET)
    option(group, "--out FILE", "JSON lines to write; continued if interrupted")
    option(group, "--seed N", "draws other prompts (default: 0)", type=whole)
    add_dtype(group)


def regenerate(args: argparse.Namespace) -> None:
    """Let the target rewrite the answers of conversations."""
    if "recipe" in args:
        return run_recipe(args, "regenerate", "self_prompts", "target", "out", "seed", "dtype")
    require(args, "self_prompts", "target", "out")
    refuse(args, "without a recipe", *PLAN)
    from drafttrain.regenerate.self_prompts import write_self_prompts
    from drafttrain.target_lm.loading import load_for_decoding

    target = load_for_decoding(args.target, **given(args, "dtype"))
    write_self_prompts(target, args.out, args.self_prompts, **given(args, "seed"))


def corpus_options(parser: argparse.ArgumentParser) -> None:
    stage_options(parser)
    group = parser.add_argument_group("with --view, RECIPE is the folder of a corpus")
    option(group, "--view N", "print examples, trained tokens in color")
    option(group, "--split", "of which split (default: train)", choices=["train", "validation"])
    option(group, "--target MODEL", "it was made for (default: the one of its run)")
    option(group, "--seed N", "draws other examples (default: 0)", type=whole)


def corpus(args: argparse.Namespace) -> None:
    """Turn conversations into token ids and loss masks."""
    if "recipe" in args:
        if Path(args.recipe).is_dir():
            raise UserError(f"RECIPE: must be a file, got the folder {args.recipe}; --view 3 shows examples")
        return run_recipe(args, "corpus", "split", "target", "seed")
    refuse(args, "with --view", *PLAN)
    from drafttrain.data.view import view_corpus
    from drafttrain.run.recorded import recorded_target
    from drafttrain.target_lm.loading import load_tokenizer

    target = args.target if "target" in args else recorded_target(args.source)
    view_corpus(args.source, load_tokenizer(target), n=args.view, **given(args, "split", "seed"))


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add `--dry-run` and `--keys`, which every command that runs stages has."""
    option(parser, "--dry-run", "print what would run, why, and what it takes")
    add_keys(parser)


def add_keys(
    parser: argparse.ArgumentParser, settings: Callable[[argparse.Namespace], type] | None = None
) -> None:
    """Add `--keys`, which explains the keys of a recipe and exits, as `--help` does.

    Args:
        settings: returns the recipe's dataclass, given the arguments parsed before `--keys`. None: `Recipe`.
    """

    class PrintKeys(argparse.Action):
        def __call__(self, parser, namespace, values, option_string=None) -> NoReturn:
            from drafttrain.run.keys import explain_keys
            from drafttrain.run.recipe import Recipe

            print(explain_keys(values, settings(namespace) if settings else Recipe))
            parser.exit()

    text = "explain the keys of a recipe, or of one section"
    option(parser, "--keys SECTION", text, action=PrintKeys, nargs="?")


def add_dtype(parser: argparse._ActionsContainer) -> None:
    """Add `--dtype`, the dtype in which the target is loaded."""
    choices = ["auto", "bfloat16", "float32", "float16"]  # float16 for the GPU; a CPU refuses it
    option(parser, "--dtype DTYPE", "auto (the fastest here), bfloat16, float32, float16", choices=choices)


def run_recipe(args: argparse.Namespace, stage: str, *names: str) -> None:
    """Run one stage of the recipe.

    Args:
        names: options of the command's form without a recipe. `--seed` and `--target` override the recipe's
            seed and target.model.

    Raises:
        UserError: any other of them was given.
    """
    keys = {"seed": "seed", "target": "target.model"}
    args.overrides += [f"--{keys[name]}={value}" for name, value in given(args, *keys).items()]
    refuse(args, "with a recipe", *(name for name in names if name not in keys))
    run_stage(args, stage)


def run_stage(args: argparse.Namespace, stage: str) -> None:
    """Run one stage of the recipe."""
    _run_stages(args, only=stage, again=[stage] if "again" in args else [])


def _run_stages(args: argparse.Namespace, again: list[str] | None = None, **selection: Any) -> None:
    require_recipe(args.recipe)

    with importing():
        from drafttrain.run.recipe import load_recipe

    recipe = load_recipe(args.recipe, args.overrides, check_trees=False)

    from drafttrain.run.stages import STAGES
    from drafttrain.run.workflow import Workflow

    workflow = Workflow(recipe, STAGES, again=again or [])
    workflow.select(**selection)  # reports missing files before torch is imported
    with importing():
        from drafttrain.run.recipe_trees import check_trees

    try:
        check_trees(recipe)
    except UserError as error:
        raise UserError(f"{args.recipe}: {error}") from None
    if "dry_run" in args:
        from drafttrain.run.estimates import estimate
        from drafttrain.run.plan import plan, print_plan

        print_plan(workflow, plan(workflow, **selection), estimate)
        return
    workflow.run(**selection)
    if {selection.get("last"), selection.get("only")} <= {None, "export"}:
        from drafttrain.run.exporting import print_next

        print_next(workflow.folder("export"))


def _add_recipe(parser: argparse.ArgumentParser, shown: str) -> None:
    option(parser, shown, "YAML file; --section.key VALUE overrides a value")


def require_recipe(path: str) -> None:
    """Raise UserError if there is no such recipe file, before seconds are spent on imports."""
    recipe = Path(path)
    try:
        is_there = recipe.exists() and not recipe.is_dir()
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise UserError(f"{recipe}: {error.strerror}; name another recipe file") from None
    if not is_there:
        raise UserError(f"{recipe}: no such recipe file")
