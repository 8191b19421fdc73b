"""The command `export`: a recipe's stage, or a bundle for other tools."""

import argparse
import shlex
from pathlib import Path

from drafttrain.run.commands import PLAN, run_recipe, stage_options
from drafttrain.run.options import given, option, refuse, require
from drafttrain.utils.errors import UserError


def export_options(parser: argparse.ArgumentParser) -> None:
    stage_options(parser)
    formats = "FORMAT: causal-lm, eagle or medusa; card with --to"
    group = parser.add_argument_group("for other tools", formats)
    option(group, "--to FORMAT", "write a bundle, or a trained drafter, in this layout")
    option(group, "--check FORMAT", "check a folder in this layout; of EAGLE heads, whoever wrote it")
    option(group, "--from FORMAT", "turn what --to wrote into a drafter's folder again", dest="back")
    option(group, "--out DIR", "folder to write; of a card, the file")
    option(group, "--target MODEL", "target it is for (default: the one the bundle names)")
    option(group, "--dtype", "of the weights (default: bfloat16)", choices=["bfloat16", "float32"])


def export(args: argparse.Namespace) -> None:
    """Bundle the drafter, or write it for other tools."""
    if "recipe" in args:
        if Path(args.recipe).is_dir():
            raise UserError(f"RECIPE: must be a file, got the folder {args.recipe}; see --to FORMAT")
        return run_recipe(args, "export", "out", "target", "dtype")
    if len(given(args, "to", "check", "back")) > 1:
        raise UserError("--to, --check, --from: exactly one must be given, got several")
    refuse(args, "without a recipe", *PLAN)
    if "check" in args:
        refuse(args, "with --check", "out", "target", "dtype")
        from drafttrain.export.formats import validate

        validate(args.check, args.source)
        print(f"{args.source}: valid {args.check}")
    elif vars(args).get("to") == "card":
        _write_card(args)
    elif "to" in args:
        require(args, "out")
        _export_to(args)
    else:
        require(args, "out")
        refuse(args, "with --from", "target", "dtype")
        from drafttrain.export.formats import import_from

        import_from(args.back, args.source, args.out)
        print(args.out)


def print_next(bundle: Path) -> None:
    """Say where the bundle is, if there is one, and what to do with it."""
    if (bundle / "config.json").exists():
        print(f"the bundle is in {bundle}; next:")
        print(f"  drafttrain generate --bundle {shlex.quote(str(bundle))} --prompt 'Hello!'")


def _write_card(args: argparse.Namespace) -> None:
    """Write the model card of a bundle, from the bundle alone; to standard output without --out."""
    from drafttrain.export.card import model_card

    refuse(args, "with --to card", "target", "dtype")
    card = model_card(args.source)
    if "out" not in args:
        print(card, end="")
        return
    from drafttrain.utils.writing import write_text

    write_text(args.out, card)
    print(args.out)


def _export_to(args: argparse.Namespace) -> None:
    import json
    import sys

    from drafttrain.export.formats import FORMATS, export_to

    if args.to not in FORMATS:
        raise UserError(f"--to: must be one of {', '.join([*FORMATS, 'card'])}, got {args.to}")
    written = export_to(args.to, args.source, args.out, **given(args, "target", "dtype"))
    print(args.out)
    for note in written.notes:
        print(f"note: {note}", file=sys.stderr)
    tokens = min(3, written.config.get("num_heads", 3))  # MEDUSA cannot draft more than it has heads
    settings = {"method": FORMATS[args.to].SERVE, "model": args.out, "num_speculative_tokens": tokens}
    print(f"vllm serve TARGET --speculative-config '{json.dumps(settings)}'", file=sys.stderr)
