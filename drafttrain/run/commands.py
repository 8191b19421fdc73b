"""What each subcommand of the command line does with its arguments.

Everything heavy is imported by the command that needs it, so that `drafttrain --help` answers at once.
"""

import argparse
import gc
import math
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drafttrain.utils.errors import UserError

LEAST_MINUTES = 2  # of the quickstart: measuring the machine and the smallest evaluation


@contextmanager
def _importing() -> Iterator[None]:
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


def run(args: argparse.Namespace) -> None:
    _require_recipe(args.recipe)

    with _importing():
        from drafttrain.run.recipe import load_recipe

    recipe = load_recipe(args.recipe, args.overrides)  # its mistakes before the stages are imported

    with _importing():
        from drafttrain.run.stages import STAGES
        from drafttrain.run.workflow import Workflow

    workflow = Workflow(recipe, STAGES)
    if args.dry_run:
        workflow.print_plan(workflow.plan(first=args.first, last=args.last, only=args.only))
    else:
        workflow.run(first=args.first, last=args.last, only=args.only)
        bundle = workflow.folder("export")
        if {args.last, args.only} <= {None, "export"} and (bundle / "config.json").exists():
            print(f"the bundle is in {bundle}; next:")
            print(f"  drafttrain generate --bundle {shlex.quote(str(bundle))} --prompt 'Hello!'")


def quickstart(args: argparse.Namespace) -> None:
    begun = time.monotonic()
    if not LEAST_MINUTES <= args.minutes < math.inf:  # NaN fails too
        raise UserError(
            f"--minutes: must be >= {LEAST_MINUTES} and finite, got {args.minutes:g}; {LEAST_MINUTES} is "
            "enough for the smallest evaluation"
        )
    _require_recipe(args.recipe)

    with _importing():
        from drafttrain.run.quickstart import quickstart

    quickstart(args.recipe, args.minutes, args.overrides, begun)


def _require_recipe(path: str) -> None:
    """Raises UserError where there is no such file, before seconds go into imports."""
    recipe = Path(path)
    try:
        is_there = recipe.exists() and not recipe.is_dir()
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise UserError(f"{recipe}: {error.strerror}; name another recipe file") from None
    if not is_there:
        raise UserError(f"{recipe}: no such recipe file")


def fetch_target(args: argparse.Namespace) -> None:
    from drafttrain.target_lm.fetch import fetch_target

    print(fetch_target(args.model, args.source, args.out))


def self_prompts(args: argparse.Namespace) -> None:
    from drafttrain.regenerate.self_prompts import write_self_prompts
    from drafttrain.target_lm.loading import load_target

    write_self_prompts(load_target(args.target), args.out, args.number, args.seed)


def view_corpus(args: argparse.Namespace) -> None:
    from drafttrain.data.view import view_corpus
    from drafttrain.run.stages import recorded_target
    from drafttrain.target_lm.loading import load_tokenizer

    tokenizer = load_tokenizer(args.target or recorded_target(args.corpus))
    view_corpus(args.corpus, tokenizer, n=args.number, seed=args.seed, split=args.split)


def calibrate(args: argparse.Namespace) -> None:
    if args.quick == (args.prompts is not None):
        raise UserError("calibrate: exactly one of --prompts FILE and --quick is needed; give one of them")

    from drafttrain.bundle import find_bundle
    from drafttrain.calibration.config import CalibrateConfig
    from drafttrain.data.config import PromptSet
    from drafttrain.run.calibrate import calibrate, calibrate_quickly

    bundle = find_bundle(args.bundle)
    options = {"target": args.target, "dtype": args.dtype, "classifier": args.classifier}
    if args.quick:
        calibrate_quickly(bundle, args.out or bundle, **options)
        return
    prompts = PromptSet("prompts", args.prompts, args.limit)
    config = CalibrateConfig(prompts=prompts, max_new_tokens=args.max_new_tokens, rounds=args.rounds)
    calibrate(config, bundle, args.out or bundle, **options)


def build_ngrams(args: argparse.Namespace) -> None:
    from drafttrain.data.config import Source
    from drafttrain.self_draft.build import NgramConfig, build_ngrams
    from drafttrain.target_lm.loading import load_tokenizer

    sources = [Source(path) for path in args.sources] + [Source(path, "oanc") for path in args.prose]
    names = ("exclude", "gram", "min_count", "top", "held_out", "processes", "memory")
    config = NgramConfig(sources, **{name: getattr(args, name) for name in names})
    config.check()  # before anything is fetched
    build_ngrams(config, load_tokenizer(args.target), args.out)


def dump_trees(args: argparse.Namespace) -> None:
    from drafttrain.bundle import find_bundle
    from drafttrain.classifier.config import DumpConfig
    from drafttrain.data.config import PromptSet
    from drafttrain.run.c2t import dump_trees

    names = ("max_new_tokens", "top_k", "max_depth", "temperature", "seed")
    settings = {name: getattr(args, name) for name in names}
    config = DumpConfig(PromptSet("prompts", args.prompts, args.limit), **settings)
    dump_trees(config, find_bundle(args.bundle), args.out, target=args.target, dtype=args.dtype)


def train_classifier(args: argparse.Namespace) -> None:
    from drafttrain.classifier.config import ClassifierConfig
    from drafttrain.classifier.train import train_classifier

    if args.start and (args.features or args.hidden is not None):
        raise UserError("--from keeps the features and the size of that classifier: leave them out")
    names = ("lr", "epochs", "batch_size", "negatives", "share", "threshold", "seed")
    settings = {name: getattr(args, name) for name in names}
    if args.features:
        settings["features"] = tuple(args.features.split(","))
    if args.hidden is not None:
        settings["hidden"] = args.hidden
    train_classifier(ClassifierConfig(**settings), args.trees, args.out, args.start, args.baselines)


def tune_self_draft(args: argparse.Namespace) -> None:
    from drafttrain.data.config import PromptSet
    from drafttrain.self_draft.settings import open_corpus
    from drafttrain.self_draft.tuning import TuneConfig, tune_self_draft
    from drafttrain.target_lm.loading import load_for_decoding

    if args.ngrams is None and args.out is None:
        raise UserError("name an n-gram cache with --ngrams, or a folder to write to with --out")
    config = TuneConfig(PromptSet("prompts", args.prompts, args.limit), args.max_new_tokens)
    target = load_for_decoding(args.target, dtype=args.dtype)
    corpus = None
    if args.ngrams is not None and (corpus := open_corpus(target, args.ngrams)) is None:
        raise UserError(f"{args.ngrams}: no n-gram cache here; build one with drafttrain build-ngrams")
    tune_self_draft(config, target, corpus, args.out or args.ngrams)


def sweep(args: argparse.Namespace) -> None:
    from drafttrain.data.config import PromptSet
    from drafttrain.evaluation.sweep import sweep
    from drafttrain.report.pictures import write_sweep

    prompts = PromptSet("prompts", args.prompts, args.limit, args.turns)
    names = ("trees", "out", "reference", "max_new_tokens", "target", "dtype", "rows")
    names += ("calibration", "classifier")
    points, _ = sweep(args.bundle, prompts, **{name: getattr(args, name) for name in names})
    write_sweep(points, Path(args.out) / "sweep.png")


def benchmark(args: argparse.Namespace) -> None:
    from drafttrain.evaluation.benchmark import BenchmarkConfig, TaskSpec, benchmark
    from drafttrain.evaluation.methods import MethodSpec

    names = ("target", "limit", "turns", "repeats", "max_new_tokens", "seed", "dtype", "skip_long", "busy")
    config = BenchmarkConfig(
        methods=[MethodSpec.parse(text) for text in args.methods],
        tasks=[TaskSpec.parse(text) for text in args.tasks],
        temperatures=args.temperature or [0.0],
        **{name: getattr(args, name) for name in names},
    )
    benchmark(config, args.out)


def trace(args: argparse.Namespace) -> None:
    from drafttrain.report.trace import trace_prompt

    names = ("out", "target", "dtype", "tree", "calibration", "max_new_tokens")
    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    found = trace_prompt(args.bundle, prompt, **{name: getattr(args, name) for name in names})
    print(f"{args.out}: {len(found.iterations)} iterations, accept_len {found.accept_len:.2f}")


def report(args: argparse.Namespace) -> None:
    from drafttrain.report.build import write_report

    page = write_report(args.benchmark, args.out, args.bundle, args.sweep, args.trace, args.png)
    print(f"{page}: {page.stat().st_size / 1e6:.2f} MB")


def compare(args: argparse.Namespace) -> int:
    from drafttrain.evaluation.compare import compare

    differing = compare(
        args.bundle,
        args.prompts,
        limit=args.limit,
        target=args.target,
        dtype=args.dtype,
        tree=args.tree,
        max_new_tokens=args.max_new_tokens,
        calibration=args.calibration,
    )
    return 1 if differing else 0


def push(args: argparse.Namespace) -> None:
    from drafttrain.export.push import prepare, push, write_publication

    if args.out and not args.dry_run:
        raise UserError("--out is the folder of a dry run: add --dry-run, or leave it out")
    publication = prepare(args.bundle, args.repo)
    sizes = publication.sizes()
    for name, size in sizes.items():
        print(f"{size:>13,}  {name}")
    print(f"{sum(sizes.values()):>13,}  bytes to {args.repo}, branch {args.revision}")
    for warning in publication.warnings:
        print(f"drafttrain: look before you publish: {warning}", file=sys.stderr)
    if args.dry_run:
        out = args.out or f"runs/push/{args.repo.split('/')[-1]}"
        write_publication(publication, out)
        print(f"nothing was sent; all of it lies in {out}")
    else:
        print(push(publication, args.private, args.revision))


def card(args: argparse.Namespace) -> None:
    from drafttrain.export.card import model_card

    card = model_card(args.bundle)
    if args.out:
        Path(args.out).parent.mkdir(parents=True, exist_ok=True)
        Path(args.out).write_text(card, encoding="utf-8")
    else:
        print(card, end="")


def export_to(args: argparse.Namespace) -> None:
    import json

    from drafttrain.export.formats import FORMATS, export_to

    written = export_to(args.format, args.bundle, args.out, args.target, args.dtype)
    print(args.out)
    for note in written.notes:
        print(f"note: {note}", file=sys.stderr)
    if method := FORMATS[args.format].serve:
        tokens = min(3, written.config.get("num_heads", 3))  # MEDUSA cannot draft more than it has heads
        settings = json.dumps({"method": method, "model": args.out, "num_speculative_tokens": tokens})
        print(f"vllm serve TARGET --speculative-config '{settings}'", file=sys.stderr)


def validate(args: argparse.Namespace) -> None:
    from drafttrain.export.formats import validate

    validate(args.format, args.folder)
    print(f"{args.folder}: right")


def import_from(args: argparse.Namespace) -> None:
    from drafttrain.export.formats import import_from

    import_from(args.format, args.folder, args.out)
    print(args.out)


def generate(args: argparse.Namespace) -> None:
    if args.bundle is None and (args.target is None or args.tree or args.calibration):
        raise UserError(
            "without --bundle the target drafts for itself: give --target, and no tree or calibration"
        )
    if args.bundle and args.ngrams and not (args.tree or "").startswith("ngram"):
        raise UserError("--ngrams is for --tree ngram and ngram+POLICY: name one of them, or leave it out")
    with _importing():
        from drafttrain.inference.sampling import SamplingParams
        from drafttrain.run.terminal import generate

    generate(
        args.bundle,
        sys.stdin.read() if args.prompt == "-" else args.prompt,
        target=args.target,
        max_new_tokens=args.max_new_tokens,
        tree=args.tree,
        calibration=args.calibration,
        dtype=args.dtype,
        color=not args.no_color,
        compare=args.compare,
        stop=args.stop,
        ngrams=args.ngrams,
        sampling=SamplingParams(args.temperature, args.top_p, args.top_k, args.seed),
    )
