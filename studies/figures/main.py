"""The figures of topic `main`: the quickstart, drafters of the recipes, exactness, the speed of training."""

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from drafttrain.bundle import load_bundle
from drafttrain.data.build import build_corpus
from drafttrain.data.config import PromptSet
from drafttrain.data.corpus import load_corpus
from drafttrain.data.prompts import Task, first_of_each, read_prompts
from drafttrain.evaluation.evaluate import evaluate
from drafttrain.evaluation.exactness import check_lossless
from drafttrain.evaluation.measure import MeasurementLog, drafting, measure
from drafttrain.evaluation.metrics import (
    tabulate,
)
from drafttrain.inference.proposer import TreeProposer
from drafttrain.run.recipe import load_recipe
from drafttrain.run.stages import STAGES
from drafttrain.run.workflow import Workflow
from drafttrain.target_lm.loading import load_target
from drafttrain.trees.chain import ChainPolicy
from drafttrain.utils.provenance import content_hash
from drafttrain.utils.writing import write_json
from studies.figures.machine_quickstart import fresh_quickstart
from studies.goals import (
    AT_LEAST,
    FIRST_TURNS,
    RAW,
    Group,
    Measured,
    Run,
    Size,
    size_of,
)
from studies.training_speed import training_speed

QUICKSTART_DRAFTER = Path("model_cards/smollm2-135m-edd")  # what the quickstart starts from
PROMPTS = {
    "mt_bench": "data/eval/mt_bench.jsonl",
    "gsm8k": "data/eval/gsm8k_test_80.jsonl",
    "humaneval": "data/eval/humaneval.jsonl.gz",
}
NEW_TOKENS = 96
EDD_CHAIN = 5
DRAFT_VOCABULARY = 8192  # smaller ones would train faster
PAPER_BATCH = 4096  # tokens: 8 rows of 512
REPEATS = 3  # of each timed measurement
ROUNDS = 7  # of training and forwards
SEEDS = 3  # of the training from scratch
CONVERSATIONS = 400  # of each bundled source: enough to time training steps on
THREE_TASKS = FIRST_TURNS | dict.fromkeys(("gsm8k", "humaneval"), AT_LEAST)


def quickstart(run: Run) -> Measured:
    """Run the quickstart script in a fresh clone with an empty target cache, installation included."""
    kept = run.folder("quickstart")
    seconds, peak = fresh_quickstart(kept)
    stages = json.loads((kept / "summary.json").read_text())
    return {
        "quickstart_wall_s": {"value": seconds, "stages_wall_s": stages["wall_seconds"]},
        "peak_rss_gb": {"value": peak / 1e9},
    }


def speed(run: Run) -> Measured:
    """Time greedy decoding in the dtype that `auto` picks against our own autoregressive decoding and
    `generate` of transformers."""
    run.check_quiet()  # before the folder is emptied
    folder, fresh = run.folder("speed"), RAW / "full/quickstart/bundle"
    bundle = fresh if fresh.exists() and not run.quick else QUICKSTART_DRAFTER
    quick = {"mt_bench": 6, "gsm8k": 5, "humaneval": 5}
    config = replace(
        load_recipe("recipes/quickstart.yaml").evaluate,
        prompts=[PromptSet(name, path, run.prompts(quick[name], None)) for name, path in PROMPTS.items()],
        max_new_tokens=NEW_TOKENS,
        repeats=1 if run.quick or run.limit else REPEATS,
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
    """Train for five minutes from scratch, from several seeds; the held-out loss must fall from each
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
        runs.append(accept_len(run, workflow.folder("export"), place))
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


def accept_len(run: Run, bundle: Path, folder: Path) -> dict[str, Any]:
    """Measure accept_len with chains of 5 on MT-bench's first turns, bf16, greedy; nothing is timed."""
    loaded = load_bundle(bundle, dtype="bfloat16")
    task = Task("mt_bench", read_prompts(PROMPTS["mt_bench"], run.prompts(16, None)))
    log = MeasurementLog(folder / "measurements.jsonl", f"{content_hash(bundle)} chain {EDD_CHAIN}")
    chain = drafting(loaded.target, TreeProposer(loaded.drafter, ChainPolicy(EDD_CHAIN)))
    measured = measure(loaded.target, {"chain": chain}, task, log, NEW_TOKENS)
    row = tabulate(measured)["chain"]
    return {
        "value": row.accept_len,
        "repetition": row.repetition,
        "without_repeats": row.accept_len_nonrepeated,
        "acceptance_by_depth": row.acceptance_by_depth,
        "size": size_of(measured),
    }


def exactness(run: Run) -> Measured:
    """Compare greedy fp32 output with our autoregressive decoding and `transformers` `generate`."""
    loaded = load_bundle(QUICKSTART_DRAFTER, dtype="float32")
    tasks = [Task(name, read_prompts(path, run.limit)) for name, path in PROMPTS.items()]
    tasks = first_of_each(tasks, 16) if run.quick else tasks
    log = MeasurementLog(run.folder("fp32") / "measurements.jsonl", content_hash(QUICKSTART_DRAFTER))
    result = check_lossless(loaded.target, loaded.proposer(), tasks, 64 if run.quick else NEW_TOKENS, log)
    size = {"prompts": {task.name: len(task.prompts) for task in tasks}}
    notes = {"prompts": result["prompts"], "differences": result["differences"], "size": size}
    differing = {(one["task"], one["prompt"]) for one in result["differences"]}  # drafted, or by `generate`
    return {"fp32_mismatches": {"value": len(differing), **notes}}


def training(run: Run) -> Measured:
    """Interleave training steps, online and offline, with bare target forwards: the EDD recipe with the
    paper's batch of 4,096 tokens and its AdamW."""
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
    rounds = 3 if run.quick else ROUNDS
    measured = training_speed(config, drafter, target, splits["train"], folder, rounds=rounds)
    write_json(folder / "rounds.json", vars(measured))
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


GROUPS = [
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
    Group({"fp32_mismatches": "== 0"}, exactness, size=Size(THREE_TASKS)),
    Group({"train_ratio": ">= 0.70", "offline_ratio": ">= 2.5"}, training, size=Size(repeats=ROUNDS)),
]
