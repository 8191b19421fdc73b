"""The figures of topic `trees`: growth policies, each tuned, against plain decoding and other engines."""

import json
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drafttrain.bundle import Bundle, load_bundle
from drafttrain.calibration.calibration import FILE as CALIBRATION
from drafttrain.calibration.config import CalibrateConfig
from drafttrain.data.config import PromptSet
from drafttrain.data.prompts import Prompt, Task, read_prompts, spread
from drafttrain.evaluation.measure import MeasurementLog, MethodRun, drafting, measure
from drafttrain.evaluation.methods import costs_of
from drafttrain.evaluation.metrics import (
    AUTOREGRESSIVE,
    TRANSFORMERS,
    Measurement,
    noise,
    ratio,
    ratio_interval,
    ratio_spread,
    tabulate,
)
from drafttrain.inference.proposer import NoProposer, TreeProposer
from drafttrain.run.calibrate import calibrate
from drafttrain.trees.costs import EXAMPLE_COSTS
from drafttrain.trees.parse import parse_policy
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint, read_json
from drafttrain.utils.provenance import content_hash, versions
from drafttrain.utils.quantiles import quartiles
from drafttrain.utils.writing import write_json
from studies.batches import batch_mismatches, batch_times
from studies.figures.main import NEW_TOKENS, PROMPTS, QUICKSTART_DRAFTER, REPEATS
from studies.goals import (
    AT_LEAST,
    FIRST_TURNS,
    Group,
    Measured,
    Run,
    Size,
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

OTHER_TASKS = {**PROMPTS, "summarization": "data/eval/summarization.jsonl"}
OTHER_TASKS.pop("mt_bench")
TUNING = "data/tuning_prompts.jsonl"
BATCH = 4  # prompts decoded at once
ALL_TASKS = FIRST_TURNS | dict.fromkeys(("gsm8k", "humaneval", "summarization"), AT_LEAST)


def calibrated(run: Run, folder: Path) -> Bundle:
    """Load the committed drafter with a calibration of this machine, which resumed runs and
    `against_vllm` use again."""
    place = folder / "calibration"
    if not (place / CALIBRATION).exists():
        prompts = PromptSet("tuning", TUNING, 8 if run.quick else 24)
        config = CalibrateConfig(prompts=prompts, rounds=5 if run.quick else 15, busy=run.busy)
        calibrate(config, QUICKSTART_DRAFTER, place, dtype="bfloat16")
    return load_bundle(QUICKSTART_DRAFTER, dtype="bfloat16", calibration=place)


def trees(run: Run) -> Measured:
    """Time growth policies, each tuned on the tuning prompts, against plain decoding and `transformers`."""
    run.check_quiet()
    folder = run.folder("trees")
    loaded = calibrated(run, folder)
    depends = [content_hash(QUICKSTART_DRAFTER), content_hash(folder / "calibration"), NEW_TOKENS, versions()]
    log = MeasurementLog(folder / "tuning.jsonl", fingerprint(depends))
    tuning = Task("(tuning)", read_prompts(TUNING, run.prompts(quick=3, full=12)))
    chosen, speeds = tune(loaded, tuning, log, NEW_TOKENS)
    write_json(folder / "tuning.json", {"chosen": chosen, "speeds": speeds})
    log = MeasurementLog(folder / "measurements.jsonl", fingerprint([depends, chosen, LARGE]))
    repeats = 1 if run.quick else REPEATS
    first = Task("mt_bench", spread(read_prompts(PROMPTS["mt_bench"]), run.prompts(quick=8, full=None)))
    half = run.prompts(quick=2, full=40)
    half = half if run.quick or run.limit is None else max(4, run.limit // 2)
    others = [Task(name, spread(read_prompts(path), half)) for name, path in OTHER_TASKS.items()]
    measured = compare(loaded, chosen | LARGE, [first], log, NEW_TOKENS, repeats)
    measured |= compare(loaded, chosen, others, log, NEW_TOKENS, repeats)
    tables = {task: table(part) for task, part in measured.items()}
    write_json(folder / "tables.json", tables)
    return tree_figures(measured, tables, chosen, fastest(folder))


def fastest(folder: Path) -> str:
    """Return the policy that was fastest on the tuning prompts, not on those that are reported.

    Raises:
        UserError: nothing has been tuned yet.
    """
    path = folder / "tuning.json"
    if not path.exists():
        raise UserError(f"{path}: nothing is tuned yet; measure best_vs_ar first")
    tuned = read_json(path)
    return max(tuned["chosen"], key=lambda name: tuned["speeds"][tuned["chosen"][name]])


def against_vllm(run: Run) -> Measured:
    """Time vLLM's CPU build with n-gram speculation over the prompts of `trees`. The fastest policy decodes
    them right before and right after, because machines drift."""
    if run.vllm_python is None:
        return {"best_vs_vllm_ngram": {"value": None, "skipped": "vLLM is not installed: no --vllm-python"}}
    run.check_quiet()
    folder = run.folder_of("trees")
    name = fastest(folder)
    best = read_json(folder / "tuning.json")["chosen"][name]
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
    found = read_json(result)
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
    """Return tokens per second of our passes over vLLM's, of each prompt the median over passes."""
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
    """Compare PCT with EAGLE-2's 50 nodes, on all prompts; nothing is timed."""
    folder = run.folder("large_trees")
    loaded = load_bundle(QUICKSTART_DRAFTER, dtype="bfloat16")
    task = Task("mt_bench", spread(read_prompts(PROMPTS["mt_bench"]), run.prompts(quick=8, full=None)))
    costs = [costs_of(loaded, tree) for tree in LARGE.values()]  # PCT as published grows by them
    log = MeasurementLog(
        folder / "measurements.jsonl", fingerprint([content_hash(QUICKSTART_DRAFTER), LARGE, costs])
    )
    methods = {name: drafting(loaded.target, loaded.proposer(tree)) for name, tree in LARGE.items()}
    return large_figures(measure(loaded.target, methods, task, log, NEW_TOKENS))


def large_figures(measured: Sequence[Measurement]) -> Measured:
    """Return accepted length and draft tokens of PCT, as published and tuned, over those of EAGLE-2."""
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
    """Return the figures of `trees` from the measurements and tables of all tasks."""
    rows = tables["mt_bench"]
    size = size_of([one for part in measured.values() for one in part])

    def speed(base: str, method: str) -> dict[str, Any]:
        value, repeats = (
            ratio(measured["mt_bench"], base, method),
            ratio_spread(measured["mt_bench"], base, method),
        )
        flags = [*rows[method]["flags"]]
        if base != AUTOREGRESSIVE:  # against which a row's own flags are
            flags += noise(repeats, value)
        notes = {"flags": flags} if flags else {}
        return {
            "value": value,
            "repeats": repeats,
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
    """Time several prompts at once: drafting against plain decoding of the same batch."""
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
    write_json(folder / "batches.json", raw)
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
    """Compare batches of 2 to 8 with one prompt at a time, in fp32, for plain decoding and the first setting
    of each policy of GRIDS, greedy and sampled."""
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
    write_json(folder / "mismatches.json", found)
    total = sum(len(rows) for part in found.values() for rows in part.values())
    return {
        "batch_mismatches": {
            "value": total,
            "policies": list(proposers),
            "rows": 2 * len(proposers) * len(sizes) * len(ids),
            **run.quick_note,
        }
    }


GROUPS = [
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
]
