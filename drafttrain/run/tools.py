"""Commands that take a bundle or a target and no recipe: the arguments of each, and what it does with them.

Everything heavy is imported by the command that needs it, so that `drafttrain --help` answers at once.
"""

import argparse
import sys
from pathlib import Path

from drafttrain.run.commands import TARGET, add_dtype, add_plan, importing, recipe_alone, run_stage
from drafttrain.run.options import add_settings, given, positive, refuse, require, whole
from drafttrain.utils.errors import UserError

ALWAYS = ("methods", "tasks", "table", "target", "dtype", "limit", "max_new_tokens", "trees")
TABLES = {  # of a benchmark: the options that each knows beside those that all know
    "speed": ("turns", "temperatures", "repeats", "seed", "skip_long", "busy", "out"),
    "texts": ("calibration",),
    "sweep": ("turns", "rows", "reference", "calibration", "classifier", "out"),
}
BENCHMARK = ("limit", "turns", "temperatures", "repeats", "max_new_tokens", "seed", "skip_long", "busy")
NGRAMS = ("exclude", "gram", "min_count", "top", "held_out", "processes", "memory")
DUMP = ("max_new_tokens", "top_k", "max_depth", "temperature")
CLASSIFIER = ("features", "hidden", "lr", "epochs", "batch_size", "negatives", "share", "threshold", "seed")
SAMPLING = ("temperature", "top_p", "top_k", "seed")
POLICY = "how drafts grow, such as chain:length=4, timed, ngram or ngram+timed (default: the bundle's)"


def calibrate_options(parser: argparse.ArgumentParser) -> None:
    from drafttrain.calibration.config import CalibrateConfig

    text = "folder of export, or a Hub id; without one, Self-Draft is tuned for --target"
    parser.add_argument("bundle", metavar="BUNDLE", nargs="?", help=text)
    _add_target(parser)
    _add_prompts(parser)
    add_settings(parser, CalibrateConfig, "quick", "rounds", "max_new_tokens")
    parser.add_argument("--ngrams", metavar="DIR", help="n-gram cache of Self-Draft (default: none)")
    text = "whose threshold to look for (default: the bundle's)"
    parser.add_argument("--classifier", metavar="DIR", help=text)
    text = "folder to write (default: the bundle's, or the cache's)"
    parser.add_argument("--out", metavar="DIR", help=text)


def calibrate(args: argparse.Namespace) -> None:
    if "bundle" not in args:
        _tune_self_draft(args)
        return
    refuse(args, "with BUNDLE", "ngrams")
    if ("quick" in args) == ("prompts" in args):
        got = "both" if "quick" in args else "neither"
        raise UserError(f"--prompts, --quick: exactly one must be given, got {got}")

    from drafttrain.bundle import find_bundle
    from drafttrain.calibration.config import CalibrateConfig
    from drafttrain.run.calibrate import calibrate

    bundle, prompts = find_bundle(args.bundle), None if "quick" in args else _prompts(args)
    config = CalibrateConfig(prompts, **given(args, "quick", "max_new_tokens", "rounds"))
    calibrate(config, bundle, vars(args).get("out", bundle), **given(args, "target", "dtype", "classifier"))


def _tune_self_draft(args: argparse.Namespace) -> None:
    require(args, "target", "prompts")
    refuse(args, "without BUNDLE", "quick", "rounds", "classifier")
    if "ngrams" not in args and "out" not in args:
        raise UserError("--out: must be given without --ngrams, got none; name a folder to write to")

    from drafttrain.self_draft.config import TuneConfig
    from drafttrain.self_draft.settings import open_corpus
    from drafttrain.self_draft.tuning import tune_self_draft
    from drafttrain.target_lm.loading import load_for_decoding

    config = TuneConfig(_prompts(args), **given(args, "max_new_tokens"))
    target = load_for_decoding(args.target, **given(args, "dtype"))
    corpus = None
    if "ngrams" in args and (corpus := open_corpus(target, args.ngrams)) is None:
        raise UserError(f"{args.ngrams}: no n-gram cache here; build one with drafttrain build-ngrams")
    tune_self_draft(config, target, corpus, args.out if "out" in args else args.ngrams)


def c2t_options(parser: argparse.ArgumentParser) -> None:
    from drafttrain.classifier.config import ClassifierConfig, DumpConfig

    text = "folder or Hub id of the drafter that grows the trees"
    parser.add_argument("bundle", metavar="BUNDLE", nargs="?", help=text)
    text = "folder of the labelled trees (default: OUT/trees)"
    parser.add_argument("--trees", metavar="DIR", help=text)
    text = "folder to write the classifier to"
    parser.add_argument("--out", metavar="DIR", help=text)
    trees = parser.add_argument_group("trees, grown along the target's own text; continued if interrupted")
    _add_prompts(trees)
    _add_target(trees)
    add_settings(trees, DumpConfig, *DUMP)
    training = parser.add_argument_group("classifier")
    add_settings(training, ClassifierConfig, *CLASSIFIER)
    text = "fine-tune this one, with its features and size"
    training.add_argument("--from", dest="start", metavar="DIR", help=text)
    text = "do not compare it with simpler classifiers"
    training.add_argument("--no-baselines", dest="baselines", action="store_false", help=text)


def c2t(args: argparse.Namespace) -> None:
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
        from drafttrain.classifier.train import train_classifier

        train_classifier(config, trees, args.out, **given(args, "start", "baselines"))


def _grow_trees(args: argparse.Namespace, out: str) -> None:
    require(args, "prompts")
    from drafttrain.bundle import find_bundle
    from drafttrain.classifier.config import DumpConfig
    from drafttrain.run.c2t import dump_trees

    config = DumpConfig(_prompts(args), **given(args, *DUMP, "seed"))
    dump_trees(config, find_bundle(args.bundle), out, **given(args, "target", "dtype"))


def build_ngrams_options(parser: argparse.ArgumentParser) -> None:
    from drafttrain.self_draft.config import NgramConfig

    text = "chats, whose assistant turns are counted, or text: files, folders or archives"
    parser.add_argument("sources", nargs="*", metavar="SOURCE", help=text)
    text = "sources that are prose (OANC): wrapped lines are joined, citation marks removed"
    parser.add_argument("--prose", nargs="+", metavar="SOURCE", help=text)
    parser.add_argument("--target", required=True, metavar="NAME", help=TARGET)
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    add_settings(parser, NgramConfig, *NGRAMS)


def build_ngrams(args: argparse.Namespace) -> None:
    from drafttrain.data.config import Source
    from drafttrain.self_draft.config import NgramConfig

    sources = [Source(path) for path in vars(args).get("sources", [])]
    sources += [Source(path, "oanc") for path in vars(args).get("prose", [])]
    config = NgramConfig(sources, **given(args, *NGRAMS))
    config.check()  # before anything heavy is imported or fetched

    from drafttrain.self_draft.build import build_ngrams
    from drafttrain.target_lm.loading import load_tokenizer

    build_ngrams(config, load_tokenizer(args.target), args.out)


def generate_options(parser: argparse.ArgumentParser) -> None:
    from drafttrain.inference.params import SamplingParams

    text = "folder of export, or a Hub id; without one, --target drafts for itself"
    parser.add_argument("--bundle", metavar="DIR", help=text)
    _add_target(parser)
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="what the user says; - reads it")
    text = "n-gram cache, for Self-Draft and trees with ngram (default: the bundle's)"
    parser.add_argument("--ngrams", metavar="DIR", help=text)
    parser.add_argument("--tree", metavar="POLICY", help=POLICY)
    _add_calibration(parser)
    text = "tokens decoded at most (default: 128)"
    parser.add_argument("--max-new-tokens", type=whole, metavar="N", help=text)
    add_settings(parser, SamplingParams, *SAMPLING)
    text = "ends the text; may be given several times"
    parser.add_argument("--stop", action="append", metavar="TEXT", help=text)
    parser.add_argument("--no-color", dest="color", action="store_false", help="plain text")
    text = "do not decode without drafts as well, to know the speedup"
    parser.add_argument("--no-compare", dest="compare", action="store_false", help=text)


def generate(args: argparse.Namespace) -> None:
    from drafttrain.inference.params import SamplingParams

    if "bundle" not in args and ("target" not in args or "tree" in args or "calibration" in args):
        raise UserError(
            "--bundle: must be given, got none; without one --target drafts for itself, without --tree and "
            "--calibration"
        )
    if "bundle" in args and "ngrams" in args and not vars(args).get("tree", "").startswith("ngram"):
        raise UserError("--ngrams: must come with --tree ngram or ngram+POLICY, got another tree")
    sampling = SamplingParams(**given(args, *SAMPLING))
    with importing():
        from drafttrain.run.terminal import generate

    names = ("target", "max_new_tokens", "tree", "calibration", "dtype", "color", "compare", "stop", "ngrams")
    generate(vars(args).get("bundle"), _text(args.prompt), sampling=sampling, **given(args, *names))


def benchmark_options(parser: argparse.ArgumentParser) -> None:
    from drafttrain.evaluation.config import BenchmarkConfig

    text = "measure its drafter as its section evaluate says"
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help=text)
    parser.add_argument("--again", action="store_true", help="repeat what the recipe has measured")
    add_plan(parser)
    group = parser.add_argument_group("without a recipe")
    text = "[NAME=]BUNDLE[@TREE], assistant=MODEL, prompt_lookup, lookahead or self_draft; repeatable"
    group.add_argument("--method", dest="methods", action="append", metavar="METHOD", help=text)
    text = "[NAME=]FILE, or hub:org/dataset[/config][:split]; repeatable"
    group.add_argument("--task", dest="tasks", action="append", metavar="TASK", help=text)
    group.add_argument("--trees", nargs="+", metavar="TREE", help="measure the bundles with each of them")
    text = "speed (default); texts: where they differ from plain ones; sweep: verified tokens by accept_len"
    group.add_argument("--table", choices=list(TABLES), metavar="TABLE", help=text)
    text = "folder to write; a benchmark there is continued"
    group.add_argument("--out", metavar="DIR", help=text)
    _add_target(group)
    add_settings(group, BenchmarkConfig, *BENCHMARK)
    _add_calibration(group)
    group.add_argument("--classifier", metavar="DIR", help="of c2t, in a sweep (default: the bundle's)")
    text = "prompts decoded at once, in a sweep; then untimed"
    group.add_argument("--rows", type=positive, metavar="N", help=text)
    text = "policy that a sweep compares with (default: eagle2)"
    group.add_argument("--reference", metavar="NAME", help=text)


def benchmark(args: argparse.Namespace) -> int | None:
    if "recipe" in args:
        recipe_alone(args, *ALWAYS, *(name for names in TABLES.values() for name in names))
        run_stage(args, "evaluate")
        return None
    from drafttrain.evaluation.config import MethodSpec, TaskSpec

    require(args, "tasks")
    table = vars(args).get("table", "speed")
    known = {*ALWAYS, *TABLES[table], "command", "overrides"}
    refuse(args, f"with --table {table}", *(vars(args).keys() - known))
    methods = [MethodSpec.parse(text) for text in vars(args).get("methods", [])]
    tasks = [TaskSpec.parse(text) for text in args.tasks]
    if table == "texts":
        return _compare_texts(args, methods, tasks)
    require(args, "out")
    if table == "sweep":
        _sweep(args, methods, tasks)
        return None
    _measure_speed(args, methods, tasks)
    return None


def _measure_speed(args: argparse.Namespace, methods: list, tasks: list) -> None:
    from dataclasses import replace

    from drafttrain.evaluation.config import ASSISTANT, BenchmarkConfig

    if "trees" in args:
        bundles = [method for method in methods if method.source and method.name != ASSISTANT]
        others = [method for method in methods if method not in bundles]
        methods = [
            replace(method, name=f"{method.name} {tree}", tree=tree)
            for method in bundles
            for tree in args.trees
        ]
        methods += others
    target = args.target if "target" in args else _target_of(methods)
    config = BenchmarkConfig(target, methods, tasks, **given(args, *BENCHMARK, "dtype"))
    config.check()

    from drafttrain.evaluation.benchmark import benchmark

    benchmark(config, args.out)


def _compare_texts(args: argparse.Namespace, methods: list, tasks: list) -> int:
    bundle = _one("--method", methods)
    trees = vars(args).get("trees", [bundle.tree])

    from drafttrain.evaluation.compare import compare

    names = ("limit", "target", "dtype", "max_new_tokens", "calibration")
    options = given(args, *names)
    differing = [
        compare(bundle.source, task.source, tree=tree, **options) for task in tasks for tree in trees
    ]
    return 1 if any(differing) else 0


def _sweep(args: argparse.Namespace, methods: list, tasks: list) -> None:
    require(args, "trees")
    bundle, task = _one("--method", methods), _one("--task", tasks)

    from drafttrain.data.config import PromptSet
    from drafttrain.evaluation.sweep import sweep
    from drafttrain.report.pictures import write_sweep

    prompts = PromptSet(task.name, task.source, **given(args, "limit", "turns"))
    names = ("reference", "max_new_tokens", "target", "dtype", "rows", "calibration", "classifier")
    points, _ = sweep(bundle.source, prompts, args.trees, args.out, **given(args, *names))
    write_sweep(points, Path(args.out) / "sweep.png")


def _one(flag: str, specs: list):
    """The only method or task.

    Raises:
        UserError: there are none or several, or a method without files.
    """
    if len(specs) != 1 or specs[0].source is None:
        names = ", ".join(spec.name for spec in specs) or "none"
        raise UserError(f"{flag}: must be exactly one with files for this table, got {names}")
    return specs[0]


def _target_of(methods: list) -> str:
    """The target that the first bundle names.

    Raises:
        UserError: there is no bundle, or it names none.
    """
    from drafttrain.bundle import find_bundle
    from drafttrain.drafters.config import read_config
    from drafttrain.evaluation.config import ASSISTANT

    bundles = [method.source for method in methods if method.source and method.name != ASSISTANT]
    name = read_config(find_bundle(bundles[0]))["target"].get("name") if bundles else None
    if name is None:
        raise UserError("--target: must be given where no bundle names one, got none")
    return name


def report_options(parser: argparse.ArgumentParser) -> None:
    text = "of a benchmark or of the stage evaluate, or a measurements.jsonl"
    parser.add_argument("folder", metavar="FOLDER", nargs="?", help=text)
    parser.add_argument("--out", metavar="FILE", help="HTML file to write")
    text = "folder or Hub id whose calibration, training log and classifier to show; repeatable"
    parser.add_argument("--bundle", action="append", metavar="DIR", help=text)
    text = "points.jsonl of benchmark --table sweep; repeatable"
    parser.add_argument("--sweep", action="append", metavar="FILE", help=text)
    parser.add_argument("--png", metavar="DIR", help="folder for the figures as PNG files")
    text = "JSON file of one text's trees to show; with --prompt it is written"
    parser.add_argument("--trace", metavar="FILE", help=text)
    group = parser.add_argument_group("trace: each iteration's tree and accepted path")
    text = "decode this with the first bundle; - reads it"
    group.add_argument("--prompt", metavar="TEXT", help=text)
    group.add_argument("--tree", metavar="POLICY", help=POLICY)
    _add_target(group)
    _add_calibration(group)
    text = "tokens decoded at most (default: 96)"
    group.add_argument("--max-new-tokens", type=positive, metavar="N", help=text)


def report(args: argparse.Namespace) -> None:
    if "folder" not in args and "prompt" not in args:
        raise UserError("FOLDER: must be given without --prompt, got none")
    if "folder" in args:
        require(args, "out")
    if "prompt" in args:
        _trace(args)
    if "folder" not in args:
        return
    from drafttrain.report.build import write_report

    shown = {"bundles": "bundle", "sweeps": "sweep", "trace": "trace", "png": "png"}
    options = {name: getattr(args, option) for name, option in shown.items() if option in args}
    page = write_report(args.folder, args.out, **options)
    print(f"{page}: {page.stat().st_size / 1e6:.2f} MB")


def _trace(args: argparse.Namespace) -> None:
    require(args, "bundle", "trace")
    from drafttrain.report.trace import trace_prompt

    names = ("target", "dtype", "tree", "calibration", "max_new_tokens")
    found = trace_prompt(args.bundle[0], _text(args.prompt), args.trace, **given(args, *names))
    print(f"{args.trace}: {len(found.iterations)} iterations, accept_len {found.accept_len:.2f}")


def push_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", metavar="BUNDLE", help="folder of export, evaluated")
    text = "where; made if it is not there"
    parser.add_argument("--repo", required=True, metavar="USER/NAME", help=text)
    text = "make the repository private; refuse one that is public"
    parser.add_argument("--private", action="store_true", help=text)
    text = "branch to commit to; made if it is not there (default: main)"
    parser.add_argument("--revision", default="main", metavar="BRANCH", help=text)
    text = "write what would be uploaded to a folder and send nothing"
    parser.add_argument("--dry-run", action="store_true", help=text)
    parser.add_argument("--out", metavar="DIR", help="folder of a dry run (default: runs/push/NAME)")


def push(args: argparse.Namespace) -> None:
    from drafttrain.export.push import prepare, push, write_publication

    if "out" in args and "dry_run" not in args:
        raise UserError(f"--out: must come with --dry-run, whose folder it is, got {args.out} without")
    publication = prepare(args.bundle, args.repo)
    sizes = publication.sizes()
    for name, size in sizes.items():
        print(f"{size:>13,}  {name}")
    print(f"{sum(sizes.values()):>13,}  bytes to {args.repo}, branch {args.revision}")
    for warning in publication.warnings:
        print(f"drafttrain: look before you publish: {warning}", file=sys.stderr)
    if "dry_run" in args:
        out = args.out if "out" in args else f"runs/push/{args.repo.split('/')[-1]}"
        write_publication(publication, out)
        print(f"nothing was sent; all of it lies in {out}")
    else:
        print(push(publication, "private" in args, args.revision))


def _add_target(parser) -> None:
    """Add --target and --dtype."""
    parser.add_argument("--target", metavar="NAME", help="target model (default: the one the bundle names)")
    add_dtype(parser)


def _add_prompts(parser) -> None:
    parser.add_argument("--prompts", metavar="FILE", help="prompts that no benchmark uses")
    text = "how many of them, evenly spaced (default: all)"
    parser.add_argument("--limit", type=positive, metavar="N", help=text)


def _add_calibration(parser) -> None:
    text = "folder of calibrate, for pct, timed and c2t (default: the bundle's)"
    parser.add_argument("--calibration", metavar="DIR", help=text)


def _prompts(args: argparse.Namespace):
    from drafttrain.data.config import PromptSet

    return PromptSet("prompts", args.prompts, **given(args, "limit"))


def _text(prompt: str) -> str:
    return sys.stdin.read() if prompt == "-" else prompt
