"""The figures of topic `self-draft`: what a target gains that drafts for itself out of n-gram caches.

"self-draft" is the paper's setting: a corpus and branches. "ngram" is what ships, after its name as a tree:
text at hand, the target's own answers as corpus, recycling, no branches unless tuning chooses some. `speeds`
times everything in one interleaved run and wants the machine for itself; `counts` only counts.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from drafttrain.bundle import Bundle, load_bundle
from drafttrain.data.config import PromptSet
from drafttrain.data.prompts import Task, read_prompts, spread
from drafttrain.evaluation.measure import (
    MeasurementLog,
    Method,
    autoregressive,
    drafting,
    measure,
    transformers_generate,
)
from drafttrain.evaluation.metrics import AUTOREGRESSIVE, Measurement, ratio, ratio_interval, tabulate
from drafttrain.evaluation.proposers import usable_proposers
from drafttrain.evaluation.stock import load_stock
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import Proposer
from drafttrain.inference.stats import DecodeStats
from drafttrain.self_draft.corpus_cache import CorpusCache
from drafttrain.self_draft.lookahead import Lookahead
from drafttrain.self_draft.prompt_lookup import PromptLookup
from drafttrain.self_draft.proposer import SelfDraft, SelfDraftConfig
from drafttrain.self_draft.settings import SETTINGS, SelfDraftSettings, open_corpus
from drafttrain.self_draft.tune_config import TuneConfig
from drafttrain.self_draft.tuning import tune_self_draft
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint
from drafttrain.utils.provenance import content_hash, versions
from studies.goals import (
    AT_LEAST,
    FIRST_TURNS,
    Group,
    Measured,
    Run,
    Size,
    run_and_watch,
    size_of,
)
from studies.policies import table

BUNDLE = Path("model_cards/smollm2-135m-edd")  # the drafter, and the n-gram cache beside it
TUNING = "data/tuning_prompts.jsonl"
MT_BENCH = "data/eval/mt_bench.jsonl"
TASKS = {
    "mt_bench": MT_BENCH,
    "gsm8k": "data/eval/gsm8k_test_80.jsonl",
    "humaneval": "data/eval/humaneval.jsonl.gz",
    "mbpp": "data/eval/mbpp.jsonl",
    "summarization": "data/eval/summarization.jsonl",
}
PREDICTABLE = ("summarization", "humaneval", "mbpp")  # where text is copied: summaries and code
NEW_TOKENS = 96
REPEATS = 3
LOOKUPS = (4, 10)  # chain lengths that our own prompt lookup is tried with
STOCK_LOOKUPS = (3, 5, 10)  # and that of transformers
EDD_TREES = (
    "pct:width=2,max_depth=8,min_confidence=0.1,threshold=0.16",
    "eagle2:top_k=3,max_depth=4,total=8",
    "timed:width=3",
)
JOINS = ((1.0, 0.2), (2.0, 0.2), (2.0, 0.4), (99.0, 0.3))  # sure and least of `HybridProposer`
# the paper's branches and sources alone; candidates are ranked and cut as everywhere here
PAPER = SelfDraftConfig(branches=6, branch_length=6, gram=4, budget=12, context=False, recycle=0)


def tasks(run: Run, quick: int) -> list[Task]:
    """Return MT-bench with the whole limit, the others with half of it."""
    most = run.prompts(quick=quick, full=None)
    half = most if most is None or run.quick else max(1, most // 2)
    return [
        Task(name, spread(read_prompts(path), most if name == "mt_bench" else half))
        for name, path in TASKS.items()
    ]


def tuned(run: Run, folder: Path, loaded: Bundle) -> SelfDraft:
    """Return Self-Draft with the bundle's cache, tuned for this machine unless the run is resumed."""
    corpus = open_corpus(loaded.target, BUNDLE)
    if not (folder / SETTINGS).exists():
        prompts = PromptSet("tuning", TUNING, 3 if run.quick else 16)
        options = {"branches": ((0, 6),), "strictness": (2.0,)} if run.quick else {}
        tune_self_draft(
            TuneConfig(prompts, NEW_TOKENS, busy=run.busy, **options), loaded.target, corpus, folder
        )
    return SelfDraftSettings.load(folder).proposer(loaded.target, corpus)


def speeds(run: Run) -> Measured:
    """Time Self-Draft, alone and beside the drafter, against prompt lookup and plain decoding."""
    run.check_quiet()
    folder = run.folder("self_draft")
    loaded = load_bundle(BUNDLE, dtype="bfloat16", calibration=BUNDLE)
    target, ngrams = loaded.target, tuned(run, folder, loaded)
    tuning = Task("(tuning)", read_prompts(TUNING, run.prompts(quick=2, full=12)))
    depends = [content_hash(BUNDLE), content_hash(folder / SETTINGS), NEW_TOKENS, versions()]
    log = MeasurementLog(folder / "tuning.jsonl", fingerprint(depends))

    def fastest(methods: dict[Any, Proposer], name: str) -> Any:
        """Return the key of the proposer that is fastest on the tuning prompts."""
        named = {f"{name} {key}": drafting(target, proposer) for key, proposer in methods.items()}
        rows = tabulate(measure(target, named, tuning, log, NEW_TOKENS))
        return max(methods, key=lambda key: rows[f"{name} {key}"].tokens_per_second)

    stock = load_stock(target, True, tuning.prompts[0].token_ids(target.tokenizer), folder).model
    theirs = {n: transformers_generate(target, stock, prompt_lookup_num_tokens=n) for n in STOCK_LOOKUPS}
    rows = tabulate(
        measure(target, {f"stock {n}": one for n, one in theirs.items()}, tuning, log, NEW_TOKENS)
    )
    their_lookup = max(theirs, key=lambda n: rows[f"stock {n}"].tokens_per_second)
    lookup = fastest({n: PromptLookup(n) for n in LOOKUPS}, "lookup")
    tree = fastest(usable_proposers(loaded, EDD_TREES), "edd")
    both = replace(loaded, ngrams=ngrams)
    joins = {
        (sure, least): replace(both.proposer(f"ngram+{tree}"), sure=sure, least=least)
        for sure, least in JOINS
    }
    join = fastest(joins, "join")
    joined = joins[join]
    paper = SelfDraft(PAPER, target.vocab_size, target.tokenizer.all_special_ids, ngrams.corpus, ngrams.odds)

    def equal(config: SelfDraftConfig) -> PromptLookup:
        return PromptLookup(config.budget + config.branches * config.branch_length)

    methods: dict[str, Method] = {
        AUTOREGRESSIVE: autoregressive(target),
        "transformers lookup": theirs[their_lookup],
        "lookup": drafting(target, PromptLookup(lookup)),
        "lookup (budget of ngram)": drafting(target, equal(ngrams.config)),
        "lookup (budget of self-draft)": drafting(target, equal(PAPER)),
        "ngram": drafting(target, ngrams),
        "self-draft": drafting(target, paper),
        "edd": drafting(target, loaded.proposer(tree)),
        "ngram+edd": drafting(target, joined),
    }
    chosen = {"lookup": lookup, "transformers lookup": their_lookup, "tree": tree, "join": join}
    (folder / "chosen.json").write_text(json.dumps(chosen, indent=1) + "\n")
    log = MeasurementLog(folder / "measurements.jsonl", fingerprint([depends, chosen]))
    repeats = 1 if run.quick else REPEATS
    parts: dict[str, list[Measurement]] = {}
    for task in tasks(run, quick=3):
        parts[task.name] = measure(target, methods, task, log, NEW_TOKENS, repeats)
    write_report(folder, chosen, parts)
    return speed_figures(parts, "self-draft") | speed_figures(parts, "ngram") | beside_figures(parts)


def write_report(folder: Path, chosen: dict[str, Any], parts: dict[str, list[Measurement]]) -> None:
    """Write the tables of all tasks, and MT-bench by category."""
    report = {"chosen": chosen, "tables": {task: table(part) for task, part in parts.items()}}
    report["mt_bench_categories"] = by_category(parts["mt_bench"])
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")


def compared(parts: dict[str, list[Measurement]], base: str, method: str) -> dict[str, Any]:
    """Return ratios of tokens per second by task, with their intervals."""
    return {
        "tasks": {name: ratio(part, base, method) for name, part in parts.items()},
        "intervals": {name: ratio_interval(part, base, method) for name, part in parts.items()},
        "flags": [f"{name}: {flag}" for name, part in parts.items() for flag in tabulate(part)[method].flags],
        "size": size_of([one for part in parts.values() for one in part]),
    }


def mean(found: dict[str, Any]) -> dict[str, Any]:
    """Return the mean over tasks. The mean of their intervals' ends is no narrower than the interval of the
    mean; there is none where a task has none, having one prompt."""
    value, intervals = statistics.mean(found["tasks"].values()), found["intervals"].values()
    ends = None if None in intervals else [statistics.mean(end) for end in zip(*intervals)]
    return {"value": value, "interval": ends, **found}


def worst(found: dict[str, Any]) -> dict[str, Any]:
    """Return the smallest ratio of a task, and the lowest ends of the intervals."""
    intervals = found["intervals"].values()
    ends = None if None in intervals else [min(end) for end in zip(*intervals)]
    return {"value": min(found["tasks"].values()), "interval": ends, **found}


def speed_figures(parts: dict[str, list[Measurement]], method: str) -> Measured:
    """Compare a method with prompt lookup that may send as many tokens, and with plain decoding."""
    tables = {name: tabulate(part) for name, part in parts.items()}
    lookup = f"lookup (budget of {method})"
    length = {name: rows[method].accept_len / rows[lookup].accept_len for name, rows in tables.items()}
    sent = {
        one: {name: rows[one].verify_per_step for name, rows in tables.items()} for one in (method, lookup)
    }
    prefix = "" if method == "self-draft" else f"{method}_"
    plain = compared(parts, AUTOREGRESSIVE, method)
    same = {"identical": {name: rows[method].identical for name, rows in tables.items()}}
    return {
        f"{prefix}accept_len_vs_lookup": {
            "value": statistics.mean(length.values()),
            "ok": min(length.values()) > 1,
            "tasks": length,
            "verify_tokens": sent,
            "size": plain["size"],
        },
        f"{prefix}speed_vs_ar": {**mean(plain), **same},
        f"{prefix}speed_vs_transformers_lookup": worst(compared(parts, "transformers lookup", method)),
    }


def beside_figures(parts: dict[str, list[Measurement]]) -> Measured:
    """Measure what the n-gram caches add to the drafter."""
    beside = compared(parts, "edd", "ngram+edd")
    copied = min(beside["tasks"][name] for name in PREDICTABLE)
    return {"edd_ngram_vs_edd": {**worst(beside), "ok": copied >= 1.1, "predictable": copied}}


def by_category(measurements: Sequence[Measurement]) -> dict[str, dict[str, float]]:
    """Return accept_len and speedup of what ships in each category of MT-bench."""
    lines = Path(MT_BENCH).read_text(encoding="utf-8").splitlines()
    category = {str(row["question_id"]): row["category"] for row in map(json.loads, lines)}
    found: dict[str, dict[str, float]] = {}
    for name in sorted(set(category.values())):
        part = [one for one in measurements if category.get(one.prompt) == name]
        if part:
            rows = tabulate(part)
            found[name] = {
                "accept_len": rows["ngram"].accept_len,
                "lookup_accept_len": rows["lookup (budget of ngram)"].accept_len,
                "speedup": rows["ngram"].speedup,
            }
    return found


def counts(run: Run) -> Measured:
    """Compare the paper's branches with none, beside text and corpus, and against lookahead decoding alone.
    These are counts; tokens per second are a note, measured without taking turns over repeats."""
    folder = run.folder("self_draft_counts")
    loaded = load_bundle(BUNDLE, dtype="bfloat16")
    target, corpus = loaded.target, open_corpus(loaded.target, BUNDLE)
    target.tap([])
    odds = SelfDraftSettings.load(BUNDLE).odds if (BUNDLE / SETTINGS).exists() else None

    def proposer(config: SelfDraftConfig, cache: CorpusCache | None) -> SelfDraft:
        return SelfDraft(config, target.vocab_size, target.tokenizer.all_special_ids, cache, odds)

    # 36 tokens of branches or window, 12 of candidates
    methods: dict[str, Proposer] = {
        "self-draft": proposer(PAPER, corpus),
        "no branches": proposer(replace(PAPER, branches=0), corpus),
        "branches, no corpus": proposer(PAPER, None),
        "text and branches": proposer(replace(PAPER, context=True), corpus),
        "text, no branches": proposer(replace(PAPER, context=True, branches=0), corpus),
        "lookahead": Lookahead(window=9, gram=5, verified=3, vocab_size=target.vocab_size),
        "everything": proposer(SelfDraftConfig(branches=6, budget=12), corpus),
        "everything, no branches": proposer(SelfDraftConfig(budget=12), corpus),
    }
    each: dict[str, dict[str, list[DecodeStats]]] = {}  # of each prompt
    sources: dict[str, dict[str, dict[str, int]]] = {}
    for task in tasks(run, quick=2):
        for one in methods.values():
            if isinstance(one, SelfDraft):
                one.accepted.clear()
        each[task.name] = {name: [] for name in methods}
        for prompt in task.prompts:
            ids = prompt.token_ids(target.tokenizer)
            for name, one in methods.items():
                each[task.name][name].append(decode_all(target, one, [ids], NEW_TOKENS)[1])
        sources[task.name] = {
            name: dict(one.accepted) for name, one in methods.items() if isinstance(one, SelfDraft)
        }
    report = {
        task: {
            name: {
                "accept_len": stats.accept_len,
                "verify_tokens_per_step": stats.verify_tokens / max(stats.steps, 1),
                "tokens_per_second": stats.tokens_per_second,
                "accepted_by_source": sources[task].get(name),
            }
            for name, stats in ((name, sum(prompts, DecodeStats())) for name, prompts in rows.items())
        }
        for task, rows in each.items()
    }
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")

    def against(base: str, method: str, key: str = "accept_len") -> dict[str, float]:
        return {task: rows[method][key] / rows[base][key] for task, rows in report.items()}

    gains = against("text, no branches", "text and branches")
    rival = against("lookahead", "branches, no corpus")
    size = {"prompts": {task: len(rows["lookahead"]) for task, rows in each.items()}}
    pairs = [(rows["lookahead"], rows["branches, no corpus"]) for rows in each.values()]
    return {
        "branches_gain": {
            "value": sorted(gains.values())[-3],  # on at least three tasks
            "tasks": gains,
            "verify_tokens": against("text, no branches", "text and branches", "verify_tokens_per_step"),
            "without text": against("no branches", "self-draft"),
            "with recycling": against("everything, no branches", "everything"),
            "size": size,
        },
        "vs_lookahead": {
            "value": statistics.mean(rival.values()),
            "interval": accept_len_interval(pairs),
            "size": size,
            "tasks": rival,
            "verify_tokens": against("lookahead", "branches, no corpus", "verify_tokens_per_step"),
            "speed": against("lookahead", "branches, no corpus", "tokens_per_second"),
        },
    }


def accept_len_interval(pairs: Sequence[tuple[list[DecodeStats], list[DecodeStats]]]) -> list[float]:
    """Return the 95 % interval of the mean over tasks of a ratio of accept_lens: bootstrap over the prompts
    of each.

    Args:
        pairs: of each task the counts of every prompt, of the base and of the method.
    """
    draws, ratios = np.random.default_rng(0), []
    for base, method in pairs:
        chosen = draws.integers(len(base), size=(1000, len(base)))  # [1000, prompts]
        lengths = []
        for stats in (method, base):
            emitted = np.array([one.new_tokens - one.prompts for one in stats])  # [prompts]
            steps = np.array([one.steps for one in stats])  # [prompts]
            lengths.append(emitted[chosen].sum(1) / np.maximum(steps[chosen].sum(1), 1))  # [1000]
        ratios.append(lengths[0] / lengths[1])
    return np.quantile(np.mean(ratios, axis=0), [0.025, 0.975]).tolist()


def cache(run: Run) -> Measured:
    """Measure size and speed of the bundle's cache."""
    found = []
    for _ in range(5):
        started = time.perf_counter()
        corpus = CorpusCache.open(BUNDLE)
        found.append(time.perf_counter() - started)
    tokenizer = load_bundle(BUNDLE, dtype="bfloat16").target.tokenizer
    texts = [tokenizer(prompt.turns[0])["input_ids"] for prompt in read_prompts(TUNING)]
    taken = []
    for ids in texts:
        for end in range(corpus.max_prefix, len(ids)):
            suffix = ids[end - corpus.max_prefix : end]
            started = time.perf_counter()
            corpus.next_tokens(suffix, 4)
            taken.append(time.perf_counter() - started)
    ngrams = sum(corpus.shape.sizes[1:])
    notes = {"ngrams": ngrams, "gram": corpus.gram, "min_count": corpus.header["min_count"]}
    return {
        "bytes_per_ngram": {"value": corpus.shape.n_bytes / ngrams, **notes},
        "lookup_us": {"value": 1e6 * statistics.median(taken), "lookups": len(taken)},
        "open_ms": {"value": 1e3 * statistics.median(found), "first": round(1e3 * found[0], 2)},
    }


def oanc(run: Run) -> Measured:
    """Build the corpus cache of OANC's written part, by the command line, its processes watched."""
    if run.oanc is None:
        skipped = {"value": None, "skipped": "give OANC's written_2 archive with --oanc"}
        return {"oanc_build_s": skipped, "oanc_build_gb": skipped}
    run.check_quiet()
    folder = run.folder("oanc")
    command = [sys.executable, "-m", "drafttrain.run.cli", "build-ngrams", "--prose", run.oanc, "--target"]
    command += ["smollm2-135m-instruct", "--min-count", "2", "--out", str(folder / "cache")]
    status, seconds, peak = run_and_watch(command, Path.cwd(), dict(os.environ), folder / "log.txt")
    if status:
        raise UserError(f"build-ngrams ended with {status}; see {folder / 'log.txt'}")
    report = json.loads((folder / "cache/report.json").read_text())
    notes = {"words": report["words"], "bytes_per_ngram": report["bytes_per_ngram"], "hits": report["hits"]}
    return {
        "oanc_build_s": {"value": seconds, **notes},
        "oanc_build_gb": {"value": peak / 1e9, "memory": "of all processes, shared pages in each"},
    }


ALL_TASKS = dict.fromkeys(TASKS, AT_LEAST) | FIRST_TURNS
GROUPS = [
    Group(
        {
            "accept_len_vs_lookup": ">= 1.15",
            "speed_vs_ar": ">= 1.25",
            "speed_vs_transformers_lookup": "> 1",
            "ngram_accept_len_vs_lookup": ">= 1.15",
            "ngram_speed_vs_ar": ">= 1.25",
            "ngram_speed_vs_transformers_lookup": "> 1",
            "edd_ngram_vs_edd": ">= 1.0",
        },
        speeds,
        size=Size(ALL_TASKS, REPEATS),
    ),
    Group({"branches_gain": ">= 1.05", "vs_lookahead": "> 1"}, counts, size=Size(ALL_TASKS)),
    Group({"bytes_per_ngram": "<= 16", "lookup_us": "<= 20", "open_ms": "<= 50"}, cache),
    Group({"oanc_build_s": "<= 90", "oanc_build_gb": "<= 2"}, oanc),
]
