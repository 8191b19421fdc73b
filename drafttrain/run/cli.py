"""The command line: which commands there are, in the order of work, and how one ends.

What each takes and does is in `commands.py` and `reason.py` (from a recipe), and in `tools.py` (with a
bundle).
"""

import argparse
import difflib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drafttrain.run import commands, reason, tools
from drafttrain.run.options import Parser
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import disk_problem
from drafttrain.utils.threads import VARIABLE, default_threads

RECIPE = "RECIPE [--section.key VALUE ...] [options]"  # the usage of what runs stages


@dataclass(frozen=True)
class Command:
    """A word of the command line.

    Attributes:
        text: what it does.
        options: adds its arguments to a parser.
        run: does it; returns the exit status, None for 0.
        example: words after the command's name.
        usage: how it is called, one line for each form.
        forms: options with which the argument RECIPE is something else.
    """

    text: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int | None]
    example: str
    usage: tuple[str, ...] = (RECIPE,)
    forms: tuple[str, ...] = ()


GROUPS = {
    "start": {
        "quickstart": Command(
            "measure this machine, and train and measure in some minutes",
            commands.quickstart_options,
            commands.quickstart,
            "--minutes 20",
            ("[--minutes N] [--section.key VALUE ...] [options]",),
        ),
        "new-recipe": Command(
            "write a short recipe for your own model and chats",
            commands.new_recipe_options,
            commands.new_recipe,
            "--target my/model --chats chats.json",
            ("--target MODEL --chats FILE [options]",),
        ),
    },
    "train, by a recipe": {
        "run": Command(
            "run all stages of a recipe, skipping what is up to date",
            commands.run_options,
            commands.run,
            "recipes/quickstart.yaml --training.lr 1e-3",
        ),
        "fetch-target": Command(
            "fetch or convert a target model and print its folder",
            commands.fetch_target_options,
            commands.fetch_target,
            "smollm2-135m-instruct",
            ("MODEL [options]",),
        ),
        "regenerate": Command(
            "let the target rewrite the answers of conversations",
            commands.regenerate_options,
            commands.regenerate,
            "recipes/quickstart.yaml",
            (RECIPE, "--self-prompts N --target NAME --out FILE [options]"),
        ),
        "corpus": Command(
            "turn conversations into token ids and loss masks",
            commands.corpus_options,
            commands.corpus,
            "recipes/quickstart.yaml",
            (RECIPE, "DIR --view N [options]"),
            ("view",),
        ),
        "collect": Command(
            "store the target's hidden states, to train offline",
            commands.stage_options,
            commands.collect,
            "recipes/quickstart.yaml",
        ),
        "train": Command(
            "train the drafter",
            commands.stage_options,
            commands.train,
            "recipes/quickstart.yaml --training.lr 1e-3",
        ),
        "export": Command(
            "bundle the drafter, or write it for other tools",
            commands.export_options,
            commands.export,
            "runs/eagle/bundle --to eagle --out runs/eagle/vllm",
            (RECIPE, "BUNDLE --to FORMAT --out DIR", "DIR --check FORMAT", "DIR --from FORMAT --out DIR"),
            ("to", "back", "check"),
        ),
    },
    "make decoding faster": {
        "calibrate": Command(
            "measure what drafting and verifying cost here",
            tools.calibrate_options,
            tools.calibrate,
            "runs/quickstart/bundle --prompts data/tuning_prompts.jsonl",
            (
                "BUNDLE --prompts FILE [options]",
                "BUNDLE --quick",
                "--target NAME --ngrams DIR --prompts FILE",
            ),
        ),
        "c2t": Command(
            "grow labelled trees and train the C2T classifier",
            tools.c2t_options,
            tools.c2t,
            "BUNDLE --prompts data/tuning_prompts.jsonl --out BUNDLE",
            (
                "BUNDLE --prompts FILE --out DIR [options]",
                "BUNDLE --prompts FILE --trees DIR    (trees alone)",
                "--trees DIR --out DIR                (classifier alone)",
            ),
        ),
        "build-ngrams": Command(
            "count the n-grams of a text, for Self-Draft",
            tools.build_ngrams_options,
            tools.build_ngrams,
            "data/train/responses.jsonl.gz --target smollm2-135m-instruct --out runs/ngrams",
            ("[SOURCE ...] --target NAME --out DIR [options]",),
        ),
    },
    "use and measure": {
        "generate": Command(
            "generate text, each iteration's tokens in their own color",
            tools.generate_options,
            tools.generate,
            '--bundle runs/quickstart/bundle --prompt "Why is the sky blue?"',
            (
                "--bundle BUNDLE --prompt TEXT [options]",
                "--target NAME --prompt TEXT [--ngrams DIR] [options]",
            ),
        ),
        "reason": Command(
            "grow trees of thoughts for the problems of a task",
            reason.reason_options,
            reason.reason,
            "recipes/reasoning/gsm8k.yaml --task.limit 4",
        ),
        "benchmark": Command(
            "measure drafting methods against plain decoding",
            tools.benchmark_options,
            tools.benchmark,
            "--method model_cards/smollm2-135m-edd --method prompt_lookup \\\n"
            "    --task data/eval/mt_bench.jsonl --limit 10 --out runs/benchmark",
            ("RECIPE [--section.key VALUE ...]", "--method BUNDLE --task FILE --out DIR [options]"),
        ),
        "report": Command(
            "write one HTML page with the figures of measurements",
            tools.report_options,
            tools.report,
            "runs/quickstart/evaluation --bundle runs/quickstart/bundle --out report.html",
            ("FOLDER --out FILE [options]", "--bundle BUNDLE --prompt TEXT --trace FILE [options]"),
        ),
        "push": Command(
            "publish a bundle on the Hugging Face Hub",
            tools.push_options,
            tools.push,
            "runs/quickstart/bundle --repo user/name --dry-run",
            ("BUNDLE --repo USER/NAME [options]",),
        ),
    },
}
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}
REMOVED = {  # what takes their place
    "build-corpus": "corpus RECIPE",
    "view-corpus": "corpus DIR --view N",
    "self-prompts": "regenerate --self-prompts N --target NAME --out FILE",
    "dump-trees": "c2t BUNDLE --prompts FILE --trees DIR",
    "train-classifier": "c2t --trees DIR --out DIR",
    "tune-self-draft": "calibrate --target NAME --ngrams DIR --prompts FILE",
    "compare": "benchmark --table texts --method BUNDLE --task FILE",
    "sweep": "benchmark --table sweep --method BUNDLE --trees POLICY ... --task FILE --out DIR",
    "evaluate": "benchmark RECIPE",
    "trace": "report --bundle BUNDLE --prompt TEXT --trace FILE",
    "card": "export BUNDLE --to card",
    "export-to": "export BUNDLE --to FORMAT --out DIR",
    "validate": "export DIR --check FORMAT",
    "import-from": "export DIR --from FORMAT --out DIR",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        the exit status: 0, 1 (`benchmark --table texts` found more than near-ties), 2 for a mistake of the
        user's, 130 after Ctrl-C.
    """
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        os.environ.setdefault(VARIABLE, str(default_threads()))  # which torch reads when it is imported
        return COMMANDS[args.command].run(args) or 0
    except UserError as error:
        print(f"drafttrain: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("drafttrain: interrupted; the same command continues where it can", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `drafttrain corpus … --view 9 | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        return 1
    except Exception as error:
        if (problem := disk_problem(error)) is None:
            raise
        print(f"drafttrain: {problem}", file=sys.stderr)
        return 2


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read a command line; prints and exits at --help.

    Returns:
        what the command's options say, with `command`, and `overrides`: the words that go to the recipe.

    Raises:
        UserError: no such command, or its arguments are wrong.
    """
    if words and words[0] in ("-h", "--help"):
        print(overview())
        sys.exit(0)
    name = words[0] if words else None
    if name not in COMMANDS:
        raise UserError(_unknown(name))
    command = COMMANDS[name]
    args, rest = _parser(name, command).parse_known_args(words[1:])
    if any(form in args for form in command.forms):
        args.source = vars(args).pop("recipe")
    if rest and "recipe" not in args:
        raise UserError(f"unexpected argument {rest[0]}; see drafttrain {name} --help")
    args.command, args.overrides = name, rest
    return args


def overview() -> str:
    """All commands in the order of work, on one screen."""
    lines = ["usage: drafttrain COMMAND [options]", ""]
    lines += ["Trains drafters for speculative decoding and measures them."]
    for group, members in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {name:<14} {command.text}" for name, command in members.items())]
    return "\n".join([*lines, "", "drafttrain COMMAND --help tells what it takes."])


def _parser(name: str, command: Command) -> Parser:
    usage = f"\n       drafttrain {name} ".join(command.usage)
    parser = Parser(
        name,
        usage=f"drafttrain {name} {usage}",
        description=f"{command.text[0].upper()}{command.text[1:]}.",
        epilog=f"example:\n  drafttrain {name} {command.example}",
    )
    command.options(parser)
    return parser


def _unknown(name: str | None) -> str:
    if name in REMOVED:
        return f"{name}: is now drafttrain {REMOVED[name]}"
    close = difflib.get_close_matches(name or "", COMMANDS, 1)
    hint = f"did you mean {close[0]}?" if close else "see drafttrain --help"
    return f"COMMAND: must be one of {len(COMMANDS)}, got {name or 'none'}; {hint}"


if __name__ == "__main__":
    sys.exit(main())
