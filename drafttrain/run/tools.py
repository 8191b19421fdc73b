"""Commands that take a bundle or a target and no recipe: the arguments of each, and what it does with them.

Slow modules are imported inside the command that needs them, so that `drafttrain --help` answers at once.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from drafttrain.run.commands import TARGET, add_dtype, importing, run_recipe, stage_options
from drafttrain.run.options import add_settings, given, option, refuse, require
from drafttrain.trees.policies import drafter_policy
from drafttrain.utils.errors import UserError
from drafttrain.utils.locks import locked

ALWAYS = ("methods", "tasks", "table", "target", "dtype", "limit", "max_new_tokens", "trees")
TABLES = {  # of a benchmark: the options that each one has in addition to `ALWAYS`
    "speed": ("turns", "temperatures", "repeats", "seed", "skip_long", "busy", "out"),
    "texts": ("calibration",),
    "diagnosis": ("out",),
    "sweep": ("turns", "rows", "reference", "calibration", "classifier", "out"),
}
BENCHMARK = ("limit", "turns", "temperatures", "repeats", "max_new_tokens", "seed", "skip_long", "busy")
NGRAMS = ("exclude", "gram", "min_count", "top", "held_out", "processes", "memory")
TRACED = ("target", "dtype", "tree", "calibration", "max_new_tokens")
DUMP = ("max_new_tokens", "top_k", "max_depth", "temperature")
CLASSIFIER = ("features", "hidden", "lr", "epochs", "batch_size", "negatives", "share", "threshold", "seed")
SAMPLING = ("temperature", "top_p", "top_k", "seed")
TREE = "how drafts grow, such as chain:length=4, timed, ngram or ngram+timed (default: the bundle's)"


def calibrate_options(parser: argparse.ArgumentParser) -> None:
    from drafttrain.calibration.config import CalibrateConfig

    option(parser, "[BUNDLE]", "folder of export, or a Hub id; without one, Self-Draft is tuned for --target")
    _add_target(parser)
    _add_prompts(parser)
    add_settings(parser, CalibrateConfig, "quick", "rounds", "max_new_tokens")
    option(parser, "--ngrams DIR", "n-gram cache of Self-Draft (default: none)")
    option(parser, "--classifier DIR", "whose threshold to look for (default: the bundle's)")
    option(parser, "--out DIR", "folder to write (default: the bundle's, or the cache's)")


def calibrate(args: argparse.Namespace) -> None:
    """Measure what drafting and verifying cost here."""
    if "bundle" not in args:
        _tune_self_draft(args)
        return
    refuse(args, "with BUNDLE", "ngrams")
    if ("quick" in args) == ("prompts" in args):
        got = "both" if "quick" in args else "neither"
        raise UserError(f"--prompts, --quick: exactly one must be given, got {got}")

    if "quick" in args:
        refuse(args, "with --quick", "rounds", "limit", "max_new_tokens")
    if vars(args).get("limit", 2) < 2:
        raise UserError(f"--limit: must be >= 2, got {args.limit}; give some dozens")
    from drafttrain.bundle import find_bundle
    from drafttrain.calibration.config import CalibrateConfig
    from drafttrain.run.calibrate import calibrate

    if "out" not in args and not os.path.exists(args.bundle):
        raise UserError("--out: must be given for a bundle of the Hub, got none; name a folder to write to")
    bundle, prompts = find_bundle(args.bundle), None if "quick" in args else _prompts(args)
    config = CalibrateConfig(prompts, **given(args, "quick", "max_new_tokens", "rounds"))
    out = vars(args).get("out", bundle)
    with _locked_default(args, out):
        calibrate(config, bundle, out, **given(args, "target", "dtype", "classifier"))


def _tune_self_draft(args: argparse.Namespace) -> None:
    require(args, "target", "prompts")
    refuse(args, "without BUNDLE", "quick", "rounds", "classifier")
    if "ngrams" not in args and "out" not in args:
        raise UserError("--out: must be given without --ngrams, got none; name a folder to write to")

    from drafttrain.self_draft.settings import open_corpus
    from drafttrain.self_draft.tune_config import TuneConfig
    from drafttrain.self_draft.tuning import tune_self_draft
    from drafttrain.target_lm.loading import load_for_decoding

    config = TuneConfig(_prompts(args), **given(args, "max_new_tokens"))
    config.check()
    target = load_for_decoding(args.target, **given(args, "dtype"))
    corpus = None
    if "ngrams" in args and (corpus := open_corpus(target, args.ngrams)) is None:
        raise UserError(f"{args.ngrams}: no n-gram cache here; build one with drafttrain build-ngrams")
    out = args.out if "out" in args else args.ngrams
    with _locked_default(args, out):
        tune_self_draft(config, target, corpus, out)


def c2t_options(parser: argparse.ArgumentParser) -> None:
    from drafttrain.classifier.config import ClassifierConfig, DumpConfig

    option(parser, "[BUNDLE]", "folder or Hub id of the drafter that grows the trees")
    option(parser, "--trees DIR", "folder of the labelled trees (default: OUT/trees)")
    option(parser, "--out DIR", "folder to write the classifier to")
    trees = parser.add_argument_group("trees, grown along the target's own text; continued if interrupted")
    _add_prompts(trees)
    _add_target(trees)
    add_settings(trees, DumpConfig, *DUMP)
    training = parser.add_argument_group("classifier")
    add_settings(training, ClassifierConfig, *CLASSIFIER)
    option(training, "--from DIR", "fine-tune this one, with its features and size", dest="start")
    option(training, "--no-baselines", "do not compare it with simpler classifiers")


def c2t(args: argparse.Namespace) -> None:
    """Grow labelled trees and train the C2T classifier."""
    if "out" not in args and ("trees" not in args or "bundle" not in args):
        raise UserError("--out: must be given, got none; with BUNDLE and --trees alone trees are grown")
    if "bundle" not in args and "trees" not in args:
        raise UserError("BUNDLE: must be given without --trees, got none")
    if "bundle" not in args:
        refuse(args, "without BUNDLE", "prompts", "limit", "target", "dtype", *DUMP)
    if "out" not in args:
        refuse(args, "without --out", "start", "baselines", *CLASSIFIER[:-1])
    if "start" in args:
        refuse(args, "with --from, whose features and size stay", "features", "hidden")
    trees = args.trees if "trees" in args else str(Path(args.out) / "trees")

    from drafttrain.classifier.config import ClassifierConfig

    settings = given(args, *CLASSIFIER)
    if "features" in args:
        settings["features"] = tuple(name for word in args.features for name in word.split(","))
    config = ClassifierConfig(**settings)
    config.check()  # before hours go into trees
    if "bundle" in args:
        _grow_trees(args, trees)
    if "out" in args:
        from drafttrain.run.c2t import train

        train(config, trees, args.out, **given(args, "start", "baselines"))


def _grow_trees(args: argparse.Namespace, out: str) -> None:
    require(args, "prompts")
    from drafttrain.bundle import find_bundle
    from drafttrain.classifier.config import DumpConfig
    from drafttrain.run.c2t import dump_trees

    config = DumpConfig(_prompts(args), **given(args, *DUMP, "seed"))
    own = "out" in args and os.path.realpath(args.out) == os.path.realpath(out)  # has its lock
    with nullcontext() if own else locked(out):
        dump_trees(config, find_bundle(args.bundle), out, **given(args, "target", "dtype"))


def build_ngrams_options(parser: argparse.ArgumentParser) -> None:
    from drafttrain.self_draft.config import NgramConfig

    text = "chats, whose assistant turns are counted, or text: files, folders or archives"
    option(parser, "[SOURCE ...]", text, nargs="*")
    text = "sources that are prose (OANC): wrapped lines are joined, citation marks removed"
    option(parser, "--prose SOURCE ...", text)
    option(parser, "--target MODEL", TARGET, required=True)
    option(parser, "--out DIR", "folder to write", required=True)
    add_settings(parser, NgramConfig, *NGRAMS)


def build_ngrams(args: argparse.Namespace) -> None:
    """Count the n-grams of a text, for Self-Draft."""
    from drafttrain.data.config import Source
    from drafttrain.self_draft.config import NgramConfig

    sources = [Source(path) for path in vars(args).get("source", [])]
    sources += [Source(path, "oanc") for path in vars(args).get("prose", [])]
    config = NgramConfig(sources, **given(args, *NGRAMS))
    config.check()  # before anything heavy is imported or fetched

    from drafttrain.self_draft.build import build_ngrams
    from drafttrain.target_lm.loading import load_tokenizer

    build_ngrams(config, load_tokenizer(args.target), args.out)


def generate_options(parser: argparse.ArgumentParser) -> None:
    from drafttrain.inference.params import SamplingParams

    option(
        parser, "--bundle BUNDLE", "folder of export, or a Hub id; without one, --target drafts for itself"
    )
    _add_target(parser)
    option(parser, "--prompt TEXT", "of the user; - reads it", required=True)
    text = "n-gram cache, for Self-Draft and trees with ngram (default: the bundle's)"
    option(parser, "--ngrams DIR", text)
    option(parser, "--tree TREE", TREE)
    _add_calibration(parser)
    option(parser, "--max-new-tokens N", "tokens decoded at most (default: 128)")
    add_settings(parser, SamplingParams, *SAMPLING)
    option(parser, "--stop TEXT", "ends the text; repeatable", action="append")
    option(parser, "--no-color", "plain text")
    option(parser, "--no-compare", "do not decode without drafts as well, to know the speedup")


def generate(args: argparse.Namespace) -> None:
    """Generate text, each iteration's tokens in their own color."""
    from drafttrain.inference.params import SamplingParams

    if "bundle" not in args and ("target" not in args or "tree" in args or "calibration" in args):
        raise UserError(
            "--bundle: must be given, got none; without one --target drafts for itself, without --tree and "
            "--calibration"
        )
    if "ngrams" in args and "tree" in args and drafter_policy(args.tree) == args.tree:
        raise UserError(f"--ngrams: must come with --tree ngram or ngram+POLICY, got --tree {args.tree}")
    sampling = SamplingParams(**given(args, *SAMPLING))
    _require_folder("--ngrams", vars(args).get("ngrams"))
    with importing():
        from drafttrain.run.terminal import generate
    _check_trees([args.tree] if "tree" in args else [])

    names = ("target", "max_new_tokens", "tree", "calibration", "dtype", "color", "compare", "stop", "ngrams")
    generate(vars(args).get("bundle"), _text(args.prompt), sampling=sampling, **given(args, *names))


def benchmark_options(parser: argparse.ArgumentParser) -> None:
    from drafttrain.evaluation.benchmark_config import BenchmarkConfig

    stage_options(parser, "[RECIPE]")
    group = parser.add_argument_group("without a recipe")
    text = "[NAME=]BUNDLE[@TREE], assistant=MODEL, prompt_lookup, lookahead or self_draft; repeatable"
    option(group, "--method BUNDLE", text, dest="methods", action="append")
    text = "[NAME=]FILE, or hub:org/dataset[/config][:split]; repeatable"
    option(group, "--task FILE", text, dest="tasks", action="append")
    option(group, "--trees TREE ...", "measure the bundles with each of them")
    text = (
        "speed (default); texts: where they differ from plain ones; sweep: verified tokens by accept_len, of "
        "first turns without --turns; diagnosis: why drafts are rejected, and what would change it"
    )
    option(group, "--table TABLE", text, choices=list(TABLES))
    option(group, "--out DIR", "folder to write or continue; of a diagnosis a file")
    _add_target(group)
    add_settings(group, BenchmarkConfig, *BENCHMARK)
    _add_calibration(group)
    option(group, "--classifier DIR", "of c2t, in a sweep (default: the bundle's)")
    option(group, "--rows N", "prompts decoded at once, in a sweep; then untimed")
    option(group, "--reference NAME", "policy that a sweep compares with (default: eagle2)")


def benchmark(args: argparse.Namespace) -> int | None:
    """Measure drafting methods against plain decoding."""
    if "recipe" in args:
        names = (*ALWAYS, *(name for names in TABLES.values() for name in names))
        return run_recipe(args, "evaluate", *names)
    from drafttrain.evaluation.benchmark_config import MethodSpec, TaskSpec

    require(args, "tasks")
    table = vars(args).get("table", "speed")
    known = {*ALWAYS, *TABLES[table], "command", "overrides"}
    refuse(args, f"with --table {table}", *(vars(args).keys() - known))
    for name in ("limit", "turns"):
        if vars(args).get(name, 1) < 1:
            raise UserError(f"--{name}: must be >= 1, got {getattr(args, name)}")
    methods = [MethodSpec.parse(text) for text in vars(args).get("methods", [])]
    tasks = [TaskSpec.parse(text) for text in args.tasks]
    if table != "speed" and (hub := [task.source for task in tasks if task.source.startswith("hub:")]):
        raise UserError(f"--task: must be a file for this table, got {hub[0]}; save its prompts first")
    if named := [method.name for method in methods if method.tree]:
        if "trees" in args or table in ("sweep", "diagnosis"):
            other = "--trees" if "trees" in args else f"--table {table}"
            raise UserError(f"--method: must name no tree (@TREE) with {other}, got one of {named[0]}")
    if table == "texts":
        return _compare_texts(args, methods, tasks)
    if table == "diagnosis":
        return _diagnose(args, methods, tasks)
    require(args, "out")
    return (_sweep if table == "sweep" else _measure_speed)(args, methods, tasks)


def _measure_speed(args: argparse.Namespace, methods: list, tasks: list) -> None:
    from dataclasses import replace

    from drafttrain.evaluation.benchmark_config import ASSISTANT, BenchmarkConfig

    if "trees" in args:
        bundles = [method for method in methods if method.source and method.name != ASSISTANT]
        others = [method for method in methods if method not in bundles]
        if not bundles:
            raise UserError(
                "--trees: must come with a method that is a bundle, got none; name one with --method"
            )
        methods = [
            replace(method, name=f"{method.name} {tree}", tree=tree)
            for method in bundles
            for tree in args.trees
        ]
        methods += others
    target = args.target if "target" in args else _target_of(methods)
    config = BenchmarkConfig(target, methods, tasks, **given(args, *BENCHMARK, "dtype"))
    config.check()
    _check_trees([method.tree for method in methods if method.tree])

    from drafttrain.evaluation.benchmark import benchmark

    benchmark(config, args.out)


def _compare_texts(args: argparse.Namespace, methods: list, tasks: list) -> int:
    bundle = _one("--method", methods)
    trees = vars(args).get("trees", [bundle.tree])
    _check_trees([tree for tree in trees if tree])

    from drafttrain.evaluation.compare import compare

    names = ("limit", "target", "dtype", "max_new_tokens", "calibration")
    options = given(args, *names)
    differing = [
        compare(bundle.source, task.source, tree=tree, **options) for task in tasks for tree in trees
    ]
    return 1 if any(differing) else 0


def _diagnose(args: argparse.Namespace, methods: list, tasks: list) -> None:
    refuse(args, "with --table diagnosis, which drafts chains", "trees")
    bundle, task = _one("--method", methods), _one("--task", tasks)

    from drafttrain.evaluation.diagnose import diagnose

    names = ("out", "limit", "target", "dtype", "max_new_tokens")
    diagnose(bundle.source, task.source, **given(args, *names))


def _sweep(args: argparse.Namespace, methods: list, tasks: list) -> None:
    require(args, "trees")
    bundle, task = _one("--method", methods), _one("--task", tasks)
    _check_trees(args.trees)

    from drafttrain.data.config import PromptSet
    from drafttrain.evaluation.sweep import sweep
    from drafttrain.report.pictures import write_sweep

    prompts = PromptSet(task.name, task.source, **given(args, "limit", "turns"))
    names = ("reference", "max_new_tokens", "target", "dtype", "rows", "calibration", "classifier")
    points, _ = sweep(bundle.source, prompts, args.trees, args.out, **given(args, *names))
    write_sweep(points, Path(args.out) / "sweep.png")


def _one(flag: str, specs: list):
    """Return the only method or task.

    Raises:
        UserError: there are none or several, or it has no files.
    """
    if len(specs) != 1 or specs[0].source is None:
        names = ", ".join(spec.name for spec in specs) or "none"
        raise UserError(f"{flag}: must be exactly one with files for this table, got {names}")
    return specs[0]


def _target_of(methods: list) -> str:
    """Return the target that the first bundle names.

    Raises:
        UserError: there is no bundle, or it names none.
    """
    from drafttrain.bundle import find_bundle, is_plain_lm
    from drafttrain.drafters.config import read_config
    from drafttrain.evaluation.benchmark_config import ASSISTANT

    bundles = [method.source for method in methods if method.source and method.name != ASSISTANT]
    bundles = [source for source in bundles if not is_plain_lm(source)]
    name = read_config(find_bundle(bundles[0]))["target"].get("name") if bundles else None
    if name is None:
        raise UserError("--target: must be given where no bundle names one, got none")
    return name


def report_options(parser: argparse.ArgumentParser) -> None:
    option(parser, "[FOLDER]", "of a benchmark or of the stage evaluate, or a measurements.jsonl")
    option(parser, "--out FILE", "HTML file to write")
    text = "folder or Hub id whose calibration, training log and classifier to show; repeatable"
    option(parser, "--bundle BUNDLE", text, dest="bundles", action="append")
    text = "points.jsonl of benchmark --table sweep; repeatable"
    option(parser, "--sweep FILE", text, dest="sweeps", action="append")
    option(parser, "--png DIR", "folder for the figures as PNG files")
    option(parser, "--trace FILE", "JSON file of one text's trees to show; with --prompt it is written")
    group = parser.add_argument_group("trace: each iteration's tree and accepted path")
    option(group, "--prompt TEXT", "decode this with the first bundle; - reads it")
    option(group, "--tree TREE", TREE)
    _add_target(group)
    _add_calibration(group)
    option(group, "--max-new-tokens N", "tokens decoded at most (default: 96)")


def report(args: argparse.Namespace) -> None:
    """Write one HTML page with the figures of measurements."""
    if "folder" not in args and "prompt" not in args:
        raise UserError("FOLDER: must be given, got none; name results, or --bundle and --prompt")
    if "folder" in args:
        require(args, "out")
    else:
        refuse(args, "without FOLDER", "out", "png", "sweeps")
    if "prompt" in args:
        _trace(args)
    else:
        refuse(args, "without --prompt", *TRACED)
    if "folder" not in args:
        return
    from drafttrain.report.build import write_report

    page = write_report(args.folder, args.out, **given(args, "bundles", "sweeps", "trace", "png"))
    print(f"{page}: {page.stat().st_size / 1e6:.2f} MB")


def _trace(args: argparse.Namespace) -> None:
    require(args, "bundles", "trace")
    from drafttrain.report.trace import trace_prompt

    found = trace_prompt(args.bundles[0], _text(args.prompt), args.trace, **given(args, *TRACED))
    print(f"{args.trace}: {len(found.iterations)} iterations, accept_len {found.accept_len:.2f}")


def push_options(parser: argparse.ArgumentParser) -> None:
    option(parser, "BUNDLE", "folder of export, evaluated")
    option(parser, "--repo USER/NAME", "where; made if it is not there", required=True)
    option(parser, "--private", "make the repository private; refuse one that is public")
    text = "branch to commit to; made if it is not there (default: main)"
    option(parser, "--revision BRANCH", text, default="main")
    option(parser, "--dry-run", "write what would be uploaded to a folder and send nothing")
    option(parser, "--out DIR", "folder of a dry run (default: runs/push/NAME)")


def push(args: argparse.Namespace) -> None:
    """Publish a bundle on the Hugging Face Hub."""
    from drafttrain.export.push import prepare, push, write_publication

    if "out" in args and "dry_run" not in args:
        raise UserError(f"--out: must come with --dry-run, whose folder it is, got {args.out} without")
    publication = prepare(args.bundle, args.repo, args.revision)
    sizes = publication.sizes()
    for name, size in sizes.items():
        print(f"{size:>13,}  {name}")
    print(f"{sum(sizes.values()):>13,}  bytes to {args.repo}, branch {args.revision}")
    for warning in publication.warnings:
        print(f"drafttrain: look before you publish: {warning}", file=sys.stderr)
    if "dry_run" in args:
        out = args.out if "out" in args else f"runs/push/{args.repo.split('/')[-1]}"
        with _locked_default(args, out):
            write_publication(publication, out)
        print(f"nothing was sent; all of it is in {out}")
    else:
        print(push(publication, "private" in args, args.revision))


def _locked_default(args: argparse.Namespace, out: str) -> AbstractContextManager:
    """Return a lock on the folder that a command writes by default; with `--out`, `cli.main` holds one."""
    return nullcontext() if "out" in args else locked(out)


def _check_trees(trees: Sequence[str]) -> None:
    """Check the names and settings of trees before a target is loaded.

    Raises:
        UserError: there is no such policy or setting.
    """
    from drafttrain.evaluation.config import EvaluateConfig

    EvaluateConfig(trees=list(trees)).check_trees()


def _require_folder(flag: str, path: str | None) -> None:
    if path is not None and not Path(path).is_dir():
        raise UserError(f"{flag}: must be a folder, got {path}; see drafttrain build-ngrams")


def _add_target(parser: argparse._ActionsContainer) -> None:
    option(parser, "--target MODEL", "target model (default: the one the bundle names)")
    add_dtype(parser)


def _add_prompts(parser: argparse._ActionsContainer) -> None:
    option(parser, "--prompts FILE", "prompts that no benchmark uses")
    option(parser, "--limit N", "how many of them, evenly spaced (default: all)")


def _add_calibration(parser: argparse._ActionsContainer) -> None:
    text = "folder of calibrate, for pct, timed and c2t (default: the bundle's)"
    option(parser, "--calibration DIR", text)


def _prompts(args: argparse.Namespace):
    from drafttrain.data.config import PromptSet

    return PromptSet("prompts", args.prompts, **given(args, "limit"))


def _text(prompt: str) -> str:
    try:
        return sys.stdin.read().removesuffix("\n") if prompt == "-" else prompt
    except UnicodeDecodeError as error:
        raise UserError(f"standard input: must be text in {error.encoding}, got other bytes") from None
