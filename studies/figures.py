"""Measures the figures that README and docs quote, and says whether they reach their goals.

    python -m studies.figures main                      everything; takes hours, wants the machine for itself
    python -m studies.figures main --quick              16 prompts, the committed drafter; at most 10 minutes
    python -m studies.figures main --only train_ratio   one figure (may be repeated)

Prints one JSON object per figure, {"figure", "value", "goal", "ok"} and notes; everything else goes to
standard error. "ok" is null, with the reason under "why", for what was measured on fewer prompts, repeats or
seeds than the figure asks, as in all quick runs. Raw measurements are kept under runs/figures/. Exits with 1
when a figure falls short or is missing. Figures that cannot be had in ten minutes are taken by --quick from
the last full run, with its date under "recorded".

A topic is a list of groups; a group is a function that measures some figures together.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from drafttrain.bundle import Bundle, load_bundle
from drafttrain.calibration.calibration import FILE as CALIBRATION
from drafttrain.calibration.config import CalibrateConfig
from drafttrain.data.build import build_corpus, load_corpus
from drafttrain.data.config import PromptSet
from drafttrain.data.prompts import Prompt, Task, first_of_each, read_prompts, spread
from drafttrain.evaluation.config import EXAMPLE_COSTS
from drafttrain.evaluation.evaluate import evaluate
from drafttrain.evaluation.exactness import check_lossless
from drafttrain.evaluation.measure import MeasurementLog, MethodRun, drafting, measure
from drafttrain.evaluation.metrics import (
    AUTOREGRESSIVE,
    TRANSFORMERS,
    Measurement,
    ratio,
    ratio_interval,
    ratio_spread,
    tabulate,
)
from drafttrain.inference.proposer import NoProposer, TreeProposer
from drafttrain.run.calibrate import calibrate
from drafttrain.run.recipe import load_recipe
from drafttrain.run.stages import STAGES
from drafttrain.run.workflow import Workflow
from drafttrain.target_lm.loading import load_target
from drafttrain.training.speed import training_speed
from drafttrain.trees.chain import ChainPolicy
from drafttrain.trees.parse import parse_policy
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint
from drafttrain.utils.provenance import content_hash, versions
from drafttrain.utils.quantiles import quartiles
from studies import (
    figures_baselines,
    figures_c2t,
    figures_drafters,
    figures_machine,
    figures_report,
    figures_self_draft,
    figures_vllm,
)
from studies.batches import batch_mismatches, batch_times
from studies.goals import (
    AT_LEAST,
    FIRST_TURNS,
    RAW,
    Group,
    Measured,
    Run,
    Size,
    measure_topic,
    size_of,
)
from studies.policies import (
    EAGLE2_LARGE,
    GRIDS,
    LARGE,
    PCT_LARGE,
    PCT_LARGE_TUNED,
    compare,
    table,
    tune,
)

ROOT = Path(__file__).resolve().parent.parent
EDD_DRAFTER = Path("model_cards/smollm2-135m-edd")  # made by recipes/smollm2-edd.yaml
QUICKSTART_DRAFTER = Path("model_cards/smollm2-135m-edd")  # what the quickstart starts from
PROMPTS = {
    "mt_bench": "data/eval/mt_bench.jsonl",
    "gsm8k": "data/eval/gsm8k_test_80.jsonl",
    "humaneval": "data/eval/humaneval.jsonl.gz",
}
OTHER_TASKS = {**PROMPTS, "summarization": "data/eval/summarization.jsonl"}
OTHER_TASKS.pop("mt_bench")
TUNING = "data/tuning_prompts.jsonl"
NEW_TOKENS = 96
EDD_CHAIN = 5
DRAFT_VOCABULARY = 8192  # smaller ones would train faster
PAPER_BATCH = 4096  # tokens: 8 rows of 512
BATCH = 4  # prompts decoded at once
REPEATS = 3  # of each timed measurement
SEEDS = 3  # of the training from scratch
CONVERSATIONS = 400  # of each bundled source: enough to time training steps on


# main


def quickstart(run: Run) -> Measured:
    """The quickstart script in a fresh clone with an empty target cache, installation included."""
    kept = run.folder("quickstart")
    seconds, peak = figures_machine.fresh_quickstart(kept)
    stages = json.loads((kept / "summary.json").read_text())
    return {
        "quickstart_wall_s": {"value": seconds, "stages_wall_s": stages["wall_seconds"]},
        "peak_rss_gb": {"value": peak / 1e9},
    }


def speed(run: Run) -> Measured:
    """Greedy decoding in bf16 against our own autoregressive decoding and `transformers` `generate`."""
    folder, fresh = run.folder("speed"), RAW / "full/quickstart/bundle"
    bundle = fresh if fresh.exists() and not run.quick else QUICKSTART_DRAFTER
    limits = {"mt_bench": 6, "gsm8k": 5, "humaneval": 5} if run.quick else {}
    config = replace(
        load_recipe("recipes/quickstart.yaml").evaluate,
        prompts=[PromptSet(name, path, limits.get(name)) for name, path in PROMPTS.items()],
        max_new_tokens=NEW_TOKENS,
        repeats=1 if run.quick else REPEATS,
        lossless_prompts=0,
        busy=run.busy,
    )
    if run.quick:
        config = replace(config, trees=[])  # what the bundle recommends, chosen in a full run
    figures = evaluate(config, bundle, folder)
    summary = json.loads((folder / "summary.json").read_text())
    row = summary["tasks"]["all"][figures["tree"]]
    tasks = {name: summary["tasks"][name][figures["tree"]]["prompts"] for name in PROMPTS}
    notes = {
        "drafter": str(bundle),
        "tree": figures["tree"],
        "identical": row["identical"],
        "dtype": summary["dtype"],
        "size": {"prompts": tasks, "repeats": config.repeats},
    }
    if row["flags"]:
        notes["flags"] = row["flags"]
    repeated = {"repetition": row["repetition"], "without_repeats": row["accept_len_nonrepeated"]}
    return {
        "quickstart_speedup_ar": {
            "value": figures["speedup"],
            "interval": row["speedup_interval"],
            "repeats": row["speedup_repeats"],
            **notes,
        },
        "quickstart_speedup_transformers": {
            "value": figures["speedup_transformers"],
            "interval": row["speedup_transformers_interval"],
            **notes,
        },
        "quickstart_accept_len": {"value": figures["accept_len"], **repeated, **notes},
    }


def scratch(run: Run) -> Measured:
    """Five minutes of training from scratch, from several seeds; the held-out loss must fall from each
    evaluation to the next. accept_len is the mean."""
    folder, runs, losses = run.folder("scratch"), [], []
    for seed in range(SEEDS):
        place = folder / f"seed{seed}"
        overrides = ["--output", str(place / "run"), "--training.seed", str(seed)]
        overrides += ["--evaluate.prompts", "[]"]  # accept_len is all that counts
        workflow = Workflow(load_recipe("recipes/scratch.yaml", overrides), STAGES)
        workflow.run()
        log = json.loads((workflow.folder("train") / "training_log.json").read_text())
        losses.append([round(entry["eval_loss"], 4) for entry in log if "eval_loss" in entry])
        runs.append(accept_len(run, workflow.folder("export"), place, turns=1))
    falling = all(len(one) > 1 and all(b < a for a, b in zip(one, one[1:])) for one in losses)
    return {
        "scratch_accept_len": {
            "value": statistics.mean(one["value"] for one in runs),
            "by_seed": runs,
            "held_out_kl": losses,
            "ok": falling,
            "size": {**runs[0]["size"], "seeds": SEEDS},
        }
    }


def edd(run: Run) -> Measured:
    """The committed drafter of recipes/smollm2-edd.yaml: the paper's one layer, chains of 5, MT-bench."""
    return {"edd_accept_len": accept_len(run, EDD_DRAFTER, run.folder("edd"), turns=2)}


def accept_len(run: Run, bundle: Path, folder: Path, turns: int) -> dict[str, Any]:
    """accept_len on MT-bench's first turns (and on both, if turns is 2), bf16, greedy; nothing is timed."""
    loaded = load_bundle(bundle, dtype="bfloat16")
    task = Task("mt_bench", read_prompts(PROMPTS["mt_bench"], 16 if run.quick else None), turns)
    log = MeasurementLog(folder / "measurements.jsonl", f"{content_hash(bundle)} chain {EDD_CHAIN}")
    chain = drafting(loaded.target, TreeProposer(loaded.drafter, ChainPolicy(EDD_CHAIN)))
    measured = measure(loaded.target, {"chain": chain}, task, log, NEW_TOKENS)
    first = tabulate([m for m in measured if m.turn == 0])["chain"]
    notes = {
        "repetition": first.repetition,
        "without_repeats": first.accept_len_nonrepeated,
        "acceptance_by_depth": first.acceptance_by_depth,
        "size": size_of(measured),
    }
    if turns > 1:
        both = tabulate(measured)["chain"]
        notes["both_turns"] = {
            "accept_len": both.accept_len,
            "repetition": both.repetition,
            "without_repeats": both.accept_len_nonrepeated,
        }
    return {"value": first.accept_len, **notes}


def exactness(run: Run) -> Measured:
    """Greedy fp32 output against our autoregressive decoding and `transformers` `generate`."""
    loaded = load_bundle(QUICKSTART_DRAFTER, dtype="float32")
    tasks = [Task(name, read_prompts(path)) for name, path in PROMPTS.items()]
    tasks = first_of_each(tasks, 16) if run.quick else tasks
    log = MeasurementLog(run.folder("fp32") / "measurements.jsonl", content_hash(QUICKSTART_DRAFTER))
    result = check_lossless(loaded.target, loaded.proposer(), tasks, 64 if run.quick else NEW_TOKENS, log)
    size = {"prompts": {task.name: len(task.prompts) for task in tasks}}
    notes = {"prompts": result["prompts"], "differences": result["differences"], "size": size}
    return {"fp32_mismatches": {"value": result["mismatches"], **notes}}


def training(run: Run) -> Measured:
    """Training steps, online and offline, and bare target forwards, by turns: the EDD recipe with the paper's
    batch of 4,096 tokens and its AdamW."""
    run.check_quiet()
    folder = run.folder("training")
    recipe = load_recipe("recipes/smollm2-edd.yaml")
    corpus = load_recipe("recipes/quickstart.yaml").corpus
    target = load_target(recipe.target.model, dtype=recipe.target.dtype, device=recipe.target.device)
    length = min(corpus.max_length, recipe.training.row_length)
    sources = [replace(source, max_conversations=CONVERSATIONS) for source in corpus.sources]
    corpus = replace(corpus, sources=sources, max_length=length)
    build_corpus(corpus, target.tokenizer, folder / "corpus")
    splits, _ = load_corpus(folder / "corpus", target.tokenizer)
    rows = PAPER_BATCH // recipe.training.row_length
    config = replace(recipe.training, init_from=None, optimizer="adamw", rows_per_batch=rows)
    vocabulary = min(recipe.drafter.draft_vocab_size or target.vocab_size, DRAFT_VOCABULARY)
    drafter = replace(recipe.drafter, draft_vocab_size=vocabulary)
    rounds = 3 if run.quick else 7
    measured = training_speed(config, drafter, target, splits["train"], folder, rounds=rounds)
    (folder / "rounds.json").write_text(json.dumps(vars(measured), indent=1) + "\n")
    notes = {
        "draft_vocab_size": vocabulary,
        "online_tokens_per_second": measured.median_online,
        "forward_tokens_per_second": measured.best_forward,
        "size": {"repeats": rounds},
    }
    return {
        "train_ratio": {"value": measured.train_ratio, **notes, "ok": vocabulary >= DRAFT_VOCABULARY},
        "offline_ratio": {"value": measured.offline_ratio, **notes},
    }


# trees


def calibrated(run: Run, folder: Path) -> Bundle:
    """The committed drafter with a calibration of this machine, measured anew unless the run is resumed."""
    place = folder / "calibration"
    if not (place / CALIBRATION).exists():
        prompts = PromptSet("tuning", TUNING, 8 if run.quick else 24)
        config = CalibrateConfig(prompts=prompts, rounds=5 if run.quick else 15, busy=run.busy)
        calibrate(config, QUICKSTART_DRAFTER, place)
    return load_bundle(QUICKSTART_DRAFTER, dtype="bfloat16", calibration=place)


def trees(run: Run) -> Measured:
    """Growth policies, each tuned on the tuning prompts, against plain decoding and `transformers`."""
    run.check_quiet()
    folder = run.folder("trees")
    loaded = calibrated(run, folder)
    depends = [content_hash(QUICKSTART_DRAFTER), content_hash(folder / "calibration"), NEW_TOKENS, versions()]
    log = MeasurementLog(folder / "tuning.jsonl", fingerprint(depends))
    tuning = Task("(tuning)", read_prompts(TUNING, run.prompts(quick=3, full=12)))
    chosen, speeds = tune(loaded, tuning, log, NEW_TOKENS)
    (folder / "tuning.json").write_text(json.dumps({"chosen": chosen, "speeds": speeds}, indent=1) + "\n")
    log = MeasurementLog(folder / "measurements.jsonl", fingerprint([depends, chosen, LARGE]))
    repeats = 1 if run.quick else REPEATS
    first = Task("mt_bench", spread(read_prompts(PROMPTS["mt_bench"]), run.prompts(quick=8, full=None)))
    half = run.prompts(quick=2, full=40)
    half = half if run.quick or run.limit is None else max(4, run.limit // 2)
    others = [Task(name, spread(read_prompts(path), half)) for name, path in OTHER_TASKS.items()]
    measured = compare(loaded, chosen | LARGE, [first], log, NEW_TOKENS, repeats)
    measured |= compare(loaded, chosen, others, log, NEW_TOKENS, repeats)
    tables = {task: table(part) for task, part in measured.items()}
    (folder / "tables.json").write_text(json.dumps(tables, indent=1) + "\n")
    return tree_figures(measured, tables, chosen, fastest(folder))


def fastest(folder: Path) -> str:
    """The policy that was fastest on the tuning prompts, not on those that are reported.

    Raises:
        UserError: nothing has been tuned yet.
    """
    path = folder / "tuning.json"
    if not path.exists():
        raise UserError(f"{path}: nothing is tuned yet; measure best_vs_ar first")
    tuned = json.loads(path.read_text())
    return max(tuned["chosen"], key=lambda name: tuned["speeds"][tuned["chosen"][name]])


def against_vllm(run: Run) -> Measured:
    """vLLM's CPU build with n-gram speculation over the prompts of `trees`. The fastest policy decodes them
    right before and right after, because machines drift."""
    if run.vllm_python is None:
        return {"best_vs_vllm_ngram": {"value": None, "skipped": "vLLM is not installed: no --vllm-python"}}
    run.check_quiet()
    folder = replace(run, resume=True).folder("trees")
    name = fastest(folder)
    best = json.loads((folder / "tuning.json").read_text())["chosen"][name]
    loaded = calibrated(run, folder)
    prompts = spread(read_prompts(PROMPTS["mt_bench"]), run.prompts(quick=8, full=None))
    ids = [prompt.token_ids(loaded.target.tokenizer) for prompt in prompts]
    own = drafting(loaded.target, loaded.proposer(best))
    own(ids[0], NEW_TOKENS)  # the first forwards of a process are slow
    before = [[own(prompt, NEW_TOKENS) for prompt in ids] for _ in range(2)]
    job = {
        "target": loaded.target.model.name_or_path,
        "prompts": ids,
        "max_new_tokens": NEW_TOKENS,
        "stop": sorted(loaded.target.eos_token_ids),
        "repeats": 1 if run.quick else REPEATS,
    }
    result = folder / "vllm_ngram.json"
    command = [run.vllm_python, "studies/vllm_ngram.py", str(result)]
    with open(folder / "vllm_ngram.log", "wb") as log:
        status = subprocess.run(command, input=json.dumps(job).encode(), stdout=log, stderr=log).returncode
    if status:
        return {"best_vs_vllm_ngram": {"value": None, "error": f"vLLM ended with {status}; see {log.name}"}}
    own(ids[0], NEW_TOKENS)
    after = [[own(prompt, NEW_TOKENS) for prompt in ids] for _ in range(2)]
    found = json.loads(result.read_text())
    theirs = [
        [MethodRun(*pair) for pair in zip(seconds, found["outputs"], strict=True)]
        for seconds in found["seconds"]
    ]
    return {"best_vs_vllm_ngram": {"tree": best, **vllm_figure(prompts, before, theirs, after)}}


def vllm_figure(
    prompts: Sequence[Prompt],
    before: list[list[MethodRun]],
    theirs: list[list[MethodRun]],
    after: list[list[MethodRun]],
) -> dict[str, Any]:
    """Tokens per second of our passes over vLLM's, of each prompt the median over passes."""
    ours = before + after

    def median(passes: list[list[MethodRun]], i: int) -> MethodRun:
        return MethodRun(statistics.median(one[i].seconds for one in passes), passes[0][i].token_ids)

    def rates(passes: list[list[MethodRun]]) -> list[float]:
        return [sum(len(r.token_ids) for r in one) / sum(r.seconds for r in one) for one in passes]

    measured = [
        Measurement("mt_bench", prompt.id, 0, 0, 0, {"ours": median(ours, i), "vllm": median(theirs, i)})
        for i, prompt in enumerate(prompts)
    ]
    return {
        "value": ratio(measured, "vllm", "ours"),
        "interval": ratio_interval(measured, "vllm", "ours"),
        "before": rates(before),
        "after": rates(after),
        "vllm": rates(theirs),
        "size": {"prompts": {"mt_bench": len(prompts)}, "repeats": min(len(ours), len(theirs))},
    }


def large_trees(run: Run) -> Measured:
    """PCT against EAGLE-2's 50 nodes, on all prompts; nothing is timed."""
    folder = run.folder("large_trees")
    loaded = load_bundle(QUICKSTART_DRAFTER, dtype="bfloat16")
    task = Task("mt_bench", spread(read_prompts(PROMPTS["mt_bench"]), run.prompts(quick=8, full=None)))
    log = MeasurementLog(
        folder / "measurements.jsonl", fingerprint([content_hash(QUICKSTART_DRAFTER), LARGE])
    )
    methods = {name: drafting(loaded.target, loaded.proposer(tree)) for name, tree in LARGE.items()}
    return large_figures(measure(loaded.target, methods, task, log, NEW_TOKENS))


def large_figures(measured: Sequence[Measurement]) -> Measured:
    """Accepted length and draft tokens of PCT, as published and tuned, over those of EAGLE-2."""
    rows = tabulate(measured)

    def against_eagle2(method: str, what: str) -> dict[str, Any]:
        values = {name: getattr(row, what) for name, row in rows.items()}
        return {
            "value": values[method] / values[EAGLE2_LARGE],
            "tree": LARGE[method],
            what: values,
            "repetition": {name: row.repetition for name, row in rows.items()},
            "size": size_of(measured),
        }

    return {
        f"{name}_{figure}_vs_eagle2": against_eagle2(method, what)
        for name, method in (("pct", PCT_LARGE), ("pct_tuned", PCT_LARGE_TUNED))
        for figure, what in (("accept_len", "accept_len"), ("verify_tokens", "verify_per_step"))
    }


def tree_figures(
    measured: dict[str, list[Measurement]],
    tables: dict[str, dict[str, dict[str, Any]]],
    chosen: dict[str, str],
    best: str,
) -> Measured:
    """The figures of `trees` from the measurements and tables of all tasks."""
    rows = tables["mt_bench"]
    size = size_of([one for part in measured.values() for one in part])

    def speed(base: str, method: str) -> dict[str, Any]:
        notes = {"flags": rows[method]["flags"]} if rows[method]["flags"] else {}
        return {
            "value": ratio(measured["mt_bench"], base, method),
            "repeats": ratio_spread(measured["mt_bench"], base, method),
            "interval": ratio_interval(measured["mt_bench"], base, method),
            "identical": rows[method]["identical"],
            "policy": method,
            "tree": chosen.get(method, method),
            "tasks": {
                task: {"value": ratio(part, base, method), "interval": ratio_interval(part, base, method)}
                for task, part in measured.items()
            },
            "size": size,
            **notes,
        }

    def over(task: str) -> dict[str, Any]:
        part = tables[task]
        other = max((n for n in chosen if n != "timed"), key=lambda n: part[n]["tokens_per_second"])
        return {
            "value": part["timed"]["tokens_per_second"] / part[other]["tokens_per_second"],
            "other": chosen[other],
            "interval": ratio_interval(measured[task], other, "timed"),
            "prompts": part[other]["prompts"],
        }

    against = {task: over(task) for task in tables}
    return {
        "ar_vs_transformers": speed(TRANSFORMERS, AUTOREGRESSIVE),
        "best_vs_ar": speed(AUTOREGRESSIVE, best),
        "best_vs_transformers": speed(TRANSFORMERS, best),
        **{
            f"{policy.replace('-', '_')}_speed_vs_eagle2": {
                **speed("eagle2", policy),
                "eagle2": chosen["eagle2"],
            }
            for policy in ("pct", "pct-tuned")
            if policy in chosen
        },
        "timed_vs_best": {
            "value": min(part["value"] for part in against.values()),
            "tasks": against,
            "size": size,
        },
        "outside_share": {
            "value": rows[best]["outside_share"],
            "tree": chosen[best],
            "inside": "calls of the target's modules and the drafter's expand and update",
            "size": size,
        },
    }


def batches(run: Run) -> Measured:
    """Several prompts at once: drafting against plain decoding of the same batch."""
    run.check_quiet()
    folder = run.folder("batches")
    loaded = calibrated(run, folder)
    prompts = spread(read_prompts(PROMPTS["mt_bench"]), run.prompts(quick=8, full=None))
    trees = [
        "chain:length=1",
        "chain:length=2",
        "chain:length=3",
        "eagle2:top_k=2,max_depth=3,total=4",
        "eagle2:top_k=3,max_depth=3,total=6",
        "pct:width=2,max_depth=4,min_confidence=0.15,threshold=0.3",
        "pct:width=2,max_depth=6,min_confidence=0.1,threshold=0.2",
        "timed:width=3",
    ]
    ids = {
        name: [prompt.token_ids(loaded.target.tokenizer) for prompt in chosen]
        for name, chosen in (("tuning", read_prompts(TUNING, 16)), ("mt_bench", prompts))
    }
    methods = {"autoregressive": NoProposer()} | {name: loaded.proposer(name) for name in trees}
    tuned = batch_times(loaded.target, methods, ids["tuning"], BATCH, NEW_TOKENS, 1)
    best = max(trees, key=lambda name: tuned[name].tokens_per_second)
    pair = {name: methods[name] for name in ("autoregressive", best)}
    repeats = 1 if run.quick else REPEATS
    found = batch_times(loaded.target, pair, ids["mt_bench"], BATCH, NEW_TOKENS, repeats)
    rows = {"tuning": tuned, "mt_bench": found}
    raw = {task: {name: asdict(times) for name, times in part.items()} for task, part in rows.items()}
    (folder / "batches.json").write_text(json.dumps(raw, indent=1) + "\n")
    ratios = [a / b for a, b in zip(*(found[name].rates for name in (best, "autoregressive")))]
    return {
        "batch4_vs_batched_ar": {
            "value": statistics.median(ratios),
            "repeats": quartiles(ratios),
            "tree": best,
            "size": {"prompts": {"mt_bench": len(prompts)}, "repeats": repeats},
            "tokens_per_second": [found[name].tokens_per_second for name in (best, "autoregressive")],
        }
    }


def batch_exactness(run: Run) -> Measured:
    """Batches of 2 to 8 against one prompt at a time, in fp32, for every policy, greedy and sampled."""
    folder = run.folder("batch_exactness")
    loaded = load_bundle(QUICKSTART_DRAFTER, dtype="float32")
    prompts = read_prompts(PROMPTS["mt_bench"], 4 if run.quick else 8)
    ids = [prompt.token_ids(loaded.target.tokenizer) for prompt in prompts]
    proposers = {"autoregressive": NoProposer()}
    for trees in GRIDS.values():  # output does not depend on what trees cost
        policy = parse_policy(trees[0], EXAMPLE_COSTS)
        proposers[trees[0]] = TreeProposer(loaded.drafter, policy)
    sizes = [3] if run.quick else range(2, 9)
    options = {"max_new_tokens": 12 if run.quick else 32}
    found = {
        f"temperature {temperature:g}": batch_mismatches(
            loaded.target, proposers, ids, sizes, temperature=temperature, **options
        )
        for temperature in (0.0, 1.0)
    }
    (folder / "mismatches.json").write_text(json.dumps(found, indent=1) + "\n")
    total = sum(len(rows) for part in found.values() for rows in part.values())
    return {
        "batch_mismatches": {
            "value": total,
            "policies": list(proposers),
            "rows": 2 * len(proposers) * len(sizes) * len(ids),
        }
    }


ALL_TASKS = FIRST_TURNS | dict.fromkeys(("gsm8k", "humaneval", "summarization"), AT_LEAST)
THREE_TASKS = FIRST_TURNS | dict.fromkeys(("gsm8k", "humaneval"), AT_LEAST)
TOPICS = {
    "main": [
        Group({"quickstart_wall_s": "<= 1500", "peak_rss_gb": "<= 6"}, quickstart, long=True),
        Group(
            {
                "quickstart_speedup_ar": ">= 1.15",
                "quickstart_speedup_transformers": ">= 1.15",
                "quickstart_accept_len": ">= 1.8",
            },
            speed,
            size=Size(THREE_TASKS, REPEATS),
        ),
        Group({"scratch_accept_len": ">= 1.15"}, scratch, long=True, size=Size(FIRST_TURNS, seeds=SEEDS)),
        Group({"edd_accept_len": ">= 2.0"}, edd, size=Size(FIRST_TURNS)),
        Group({"fp32_mismatches": "== 0"}, exactness, size=Size(THREE_TASKS)),
        Group({"train_ratio": ">= 0.70", "offline_ratio": ">= 2.5"}, training, size=Size(repeats=REPEATS)),
    ],
    "trees": [
        Group(
            {
                "ar_vs_transformers": ">= 1.5",
                "best_vs_ar": ">= 1.5",
                "best_vs_transformers": ">= 2.2",
                "pct_speed_vs_eagle2": "> 1",
                "pct_tuned_speed_vs_eagle2": "> 1",
                "timed_vs_best": ">= 0.99",
                "outside_share": "<= 0.10",
            },
            trees,
            size=Size(ALL_TASKS, REPEATS),
        ),
        Group({"best_vs_vllm_ngram": "> 1"}, against_vllm, size=Size(FIRST_TURNS, REPEATS)),
        Group(
            {
                "pct_accept_len_vs_eagle2": ">= 0.97",
                "pct_verify_tokens_vs_eagle2": "<= 0.60",
                "pct_tuned_accept_len_vs_eagle2": ">= 0.97",
                "pct_tuned_verify_tokens_vs_eagle2": "<= 0.60",
            },
            large_trees,
            size=Size(FIRST_TURNS),
        ),
        Group({"batch4_vs_batched_ar": ">= 1.2"}, batches, size=Size(FIRST_TURNS, REPEATS)),
        Group({"batch_mismatches": "== 0"}, batch_exactness),
    ],
    "c2t": figures_c2t.GROUPS,
    "self-draft": figures_self_draft.GROUPS,
    "machine": figures_machine.GROUPS,
    "baselines": [
        *figures_drafters.GROUPS,
        *figures_vllm.GROUPS,
        *figures_baselines.GROUPS,
        *figures_report.GROUPS,
    ],
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("topic", choices=TOPICS)
    parser.add_argument("--quick", action="store_true", help="16 prompts, the committed drafter")
    parser.add_argument("--only", action="append", default=[], metavar="FIGURE", help="may be repeated")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run's raw data")
    text = "prompts of each task at most, for trees, c2t, self-draft, machine, baselines"
    parser.add_argument("--limit", type=int, metavar="N", help=text)
    parser.add_argument("--vllm-python", metavar="PATH", help="Python of an environment with vLLM")
    parser.add_argument("--oanc", metavar="FILE", help="OANC's oanc_written_2.zip, for self-draft")
    text = "prompts of a further task for c2t, such as alpaca=questions.jsonl; may be repeated"
    parser.add_argument("--prompts", action="append", default=[], metavar="NAME=FILE", help=text)
    parser.add_argument("--busy", choices=["refuse", "warn"], default="refuse", help="on a busy machine")
    args = parser.parse_args(argv)
    names = [name for group in TOPICS[args.topic] for name in group.goals]
    if unknown := set(args.only) - set(names):
        parser.error(f"{', '.join(sorted(unknown))}: no such figure; there are {', '.join(names)}")
    if args.vllm_python and not Path(args.vllm_python).exists():
        parser.error(f"--vllm-python: {args.vllm_python} does not exist")
    if args.oanc and not Path(args.oanc).exists():
        parser.error(f"--oanc: {args.oanc} does not exist")
    more = dict(item.partition("=")[::2] for item in args.prompts)
    if more and args.topic != "c2t":
        parser.error("--prompts is for topic c2t")
    for name, path in more.items():
        if not name.isidentifier() or name in figures_c2t.TASKS:
            parser.error(f"--prompts {name}={path}: name a task of your own, in letters")
        if not Path(path).is_file():
            parser.error(f"--prompts {name}={path}: no such file")
    run = Run(args.topic, args.quick, args.resume, args.busy, args.limit, args.vllm_python, more, args.oanc)
    return 0 if measure_topic(TOPICS[args.topic], run, args.only) else 1


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
