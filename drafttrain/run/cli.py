"""The command line: the commands in the order of work, parsing, and exit statuses.

The commands are in `start.py`, in `commands.py`, `exporting.py`, `reason.py` and `pipeline.py` (they take a
recipe), and in `tools.py` (they take a bundle).
"""

import argparse
import contextlib
import difflib
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import NoReturn

from drafttrain.run.options import Parser, flag_of
from drafttrain.utils.disk import disk_problem
from drafttrain.utils.errors import UserError
from drafttrain.utils.threads import VARIABLE, default_threads

WRITTEN = ("out", "trace", "png")  # arguments that name what a command writes
RECIPE = "RECIPE [--section.key VALUE ...] [options]"  # the usage of what runs stages


@dataclass(frozen=True)
class Command:
    """A command NAME: the function NAME runs it and returns the exit status (None for 0), its docstring is
    the help text; the function NAME_options adds its arguments to a parser.

    Attributes:
        module: module of `drafttrain.run` that has both functions.
        example: arguments of the example in the help.
        usage: how it is called, one line for each form.
        forms: options with which the argument RECIPE is no recipe; it is then parsed as `source`.
    """

    module: str
    example: str
    usage: tuple[str, ...] = (RECIPE,)
    forms: tuple[str, ...] = ()


GROUPS = {
    "start": {
        "quickstart": Command(
            "start", "--minutes 20", ("[--minutes N] [--section.key VALUE ...] [options]",)
        ),
        "new-recipe": Command(
            "start", "--target my/model --chats chats.json", ("--target MODEL --chats FILE [options]",)
        ),
    },
    "train, by a recipe": {
        "run": Command("commands", "recipes/quickstart.yaml --training.lr 1e-3"),
        "fetch-target": Command("start", "smollm2-135m-instruct", ("MODEL [options]",)),
        "regenerate": Command(
            "commands",
            "recipes/quickstart.yaml",
            (RECIPE, "--self-prompts N --target MODEL --out FILE [options]"),
        ),
        "corpus": Command(
            "commands", "recipes/quickstart.yaml", (RECIPE, "DIR --view N [options]"), ("view",)
        ),
        "collect": Command("commands", "recipes/quickstart.yaml"),
        "train": Command("commands", "recipes/quickstart.yaml --training.lr 1e-3"),
        "export": Command(
            "exporting",
            "runs/eagle/bundle --to eagle --out runs/eagle/vllm",
            (RECIPE, "BUNDLE --to FORMAT --out DIR", "DIR --check FORMAT", "DIR --from FORMAT --out DIR"),
            ("to", "back", "check"),
        ),
    },
    "make decoding faster": {
        "calibrate": Command(
            "tools",
            "runs/quickstart/bundle --prompts data/tuning_prompts.jsonl",
            (
                "BUNDLE --prompts FILE [options]",
                "BUNDLE --quick",
                "--target MODEL --ngrams DIR --prompts FILE",
            ),
        ),
        "c2t": Command(
            "tools",
            "BUNDLE --prompts data/heldout_prompts.jsonl --out BUNDLE",
            (
                "BUNDLE --prompts FILE --out DIR [options]",
                "BUNDLE --prompts FILE --trees DIR    (trees alone)",
                "--trees DIR --out DIR                (classifier alone)",
            ),
        ),
        "build-ngrams": Command(
            "tools",
            "data/train/responses.jsonl.gz --target smollm2-135m-instruct --out runs/ngrams",
            ("[SOURCE ...] --target MODEL --out DIR [options]",),
        ),
    },
    "use and measure": {
        "generate": Command(
            "tools",
            '--bundle runs/quickstart/bundle --prompt "Why is the sky blue?"',
            (
                "--bundle BUNDLE --prompt TEXT [options]",
                "--target MODEL --prompt TEXT [--ngrams DIR] [options]",
            ),
        ),
        "reason": Command("reason", "recipes/reasoning/gsm8k.yaml --task.limit 4"),
        "pipeline": Command(
            "pipeline",
            "recipes/pipeline/smollm2-2.yaml --limit 4",
            (RECIPE, "RECIPE --simulate [--section.key VALUE ...]"),
        ),
        "benchmark": Command(
            "tools",
            "--method model_cards/smollm2-135m-edd --method prompt_lookup \\\n"
            "    --task data/eval/mt_bench.jsonl --limit 10 --out runs/benchmark",
            ("RECIPE [--section.key VALUE ...]", "--method BUNDLE --task FILE --out DIR [options]"),
        ),
        "report": Command(
            "tools",
            "runs/quickstart/evaluation --bundle runs/quickstart/bundle --out report.html",
            ("FOLDER --out FILE [options]", "--bundle BUNDLE --prompt TEXT --trace FILE [options]"),
        ),
        "push": Command(
            "tools",
            "runs/quickstart/bundle --repo user/name --dry-run",
            ("BUNDLE --repo USER/NAME [options]",),
        ),
    },
}
NOT_RESUMED = ("generate", "pipeline")  # write nothing before their end
COMMANDS = {name: command for group in GROUPS.values() for name, command in group.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, with locks on the files and folders that its arguments (`WRITTEN`) name.

    Returns:
        the exit status: 0; 1 (outputs differ beyond near-ties, `pipeline` lost a rank, nobody reads stdout);
        2 for a mistake of the user's, a full disk or too little memory; 130 after Ctrl-C, 143 after SIGTERM.
    """
    args = argparse.Namespace()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError):  # None, or a notebook's
            stream.reconfigure(errors="replace")  # what the terminal's encoding lacks is shown as "?"
    try:
        args = parse(sys.argv[1:] if argv is None else argv)
        os.environ.setdefault(VARIABLE, str(default_threads()))  # which torch reads when it is imported
        if not (sys.stderr and sys.stderr.isatty()):  # a log, which bars fill with hundreds of lines
            os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers obeys it as well
        with contextlib.ExitStack() as stack:
            stack.enter_context(_terminated_like_interrupted())
            for name in WRITTEN:
                if name in args and (name != "trace" or "prompt" in args):  # a report without prompt reads it
                    from drafttrain.utils.locks import locked

                    setattr(args, name, os.path.expanduser(getattr(args, name)))  # the shell leaves --out=~/x
                    stack.enter_context(locked(getattr(args, name)))
            return _function(args.command)(args) or 0
    except UserError as error:
        print(f"drafttrain: {_as_shown(str(error), args)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        how, status = ("terminated", 143) if isinstance(error, Terminated) else ("interrupted", 130)
        kept = (
            "nothing is kept"
            if getattr(args, "command", None) in NOT_RESUMED
            else "the same command continues where it can"
        )
        print(f"drafttrain: {how}; {kept}", file=sys.stderr)
        return status
    except BrokenPipeError:  # `drafttrain corpus … --view 9 | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        return 1
    except Exception as error:
        from drafttrain.utils.memory import memory_problem

        if (problem := disk_problem(error) or memory_problem(error)) is None:
            raise
        print(f"drafttrain: {problem}", file=sys.stderr)
        return 2


class Terminated(KeyboardInterrupt):
    """Raised at SIGTERM, so that it ends a command as Ctrl-C does."""


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Raise `Terminated` at SIGTERM while the block runs; outside the main thread, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Read a command line; print and exit at --help.

    Returns:
        the command's arguments, with `command`, and `overrides`: the words that go to the recipe.

    Raises:
        UserError: no such command, or its arguments are wrong.
    """
    if words and words[0] in ("-h", "--help"):
        from drafttrain.run.help import overview

        print(
            overview({group: {name: _function(name).__doc__ for name in GROUPS[group]} for group in GROUPS})
        )
        sys.exit(0)
    name = words[0] if words else None
    if name not in COMMANDS:
        from drafttrain.run.help import unknown

        raise UserError(unknown(name, COMMANDS))
    command = COMMANDS[name]
    parser = _parser(name, command)
    _refuse_mistyped(words[1:], parser.options)
    args, rest = parser.parse_known_args(words[1:])
    if any(form in args for form in command.forms):
        args.source = vars(args).pop("recipe")
    if rest and "recipe" not in args:
        raise UserError(f"unexpected argument {rest[0]}; see drafttrain {name} --help")
    args.command, args.overrides = name, rest
    return args


def _refuse_mistyped(words: Sequence[str], options: Collection[str]) -> None:
    """Refuse what looks like a mistyped option, before it is read as a recipe key or reported as missing.

    Raises:
        UserError: names the option that is meant.
    """
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in options:
            if meant := difflib.get_close_matches(name, options, 1, cutoff=0.85):
                raise UserError(f"{name}: no such option; did you mean {meant[0]}?")


def _parser(name: str, command: Command) -> Parser:
    usage = f"\n       drafttrain {name} ".join(command.usage)
    parser = Parser(
        name,
        usage=f"drafttrain {name} {usage}",
        description=_function(name).__doc__,
        epilog=f"example:\n  drafttrain {name} {command.example}",
    )
    _function(name, "_options")(parser)
    return parser


def _function(name: str, suffix: str = "") -> Callable:
    """Return a command's function, or with the suffix "_options" the one that adds its arguments."""
    module = import_module(f"drafttrain.run.{COMMANDS[name].module}")
    return getattr(module, name.replace("-", "_") + suffix)


def _as_shown(message: str, args: argparse.Namespace) -> str:
    """Return a message with its leading key as an option: "max_depth: …" becomes "--max-depth: …"."""
    key, colon, rest = message.partition(":")
    name = key.removeprefix(f"{vars(args).get('command')}.")  # a section of a recipe, too
    if not colon or name not in args or "recipe" in args:
        return message
    return f"{flag_of(name)}:{rest}"


if __name__ == "__main__":
    sys.exit(main())
