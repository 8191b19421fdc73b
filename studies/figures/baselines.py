"""The figures of topic `baselines`: how much of a benchmark is the benchmark itself, and how well it repeats.

Both run `drafttrain benchmark` as users do and want the machine for themselves.
"""

from typing import Any

from drafttrain.evaluation.benchmark import benchmark
from drafttrain.evaluation.benchmark_config import BenchmarkConfig, MethodSpec, TaskSpec
from drafttrain.evaluation.config import ALL, AUTOREGRESSIVE
from studies.goals import Group, Measured, Run, Size

TARGET = "smollm2-135m-instruct"
BUNDLE = "model_cards/smollm2-135m-edd"
METHODS = (f"edd={BUNDLE}", f"ngram={BUNDLE}@ngram", "prompt_lookup")
TASKS = ("mt_bench=data/eval/mt_bench.jsonl", "gsm8k=data/eval/gsm8k_test_80.jsonl")
NEW_TOKENS = 96
REPEATS = 3
PROMPTS = 8  # of each task, in full runs


def config(run: Run) -> BenchmarkConfig:
    """Return the benchmark that both figures run."""
    return BenchmarkConfig(
        target=TARGET,
        methods=[MethodSpec.parse(text) for text in METHODS],
        tasks=[TaskSpec.parse(text) for text in TASKS],
        limit=run.prompts(quick=1, full=PROMPTS),
        repeats=1 if run.quick else REPEATS,
        max_new_tokens=32 if run.quick else NEW_TOKENS,
        busy=run.busy,
    )


def overhead(run: Run) -> Measured:
    """Time of the measured turns outside the methods' runs: building prompts, looking at load and memory,
    choosing taps, writing the raw file, the progress bar. Loading and warm-up are no part of it."""
    summary = benchmark(config(run), run.folder("benchmark_overhead"))
    harness, turns = summary["harness"], overall(summary)[AUTOREGRESSIVE]["prompts"]
    notes = {"seconds": harness["seconds"], "turns": turns * config(run).repeats}
    if config(run).limit < PROMPTS:
        notes |= {"ok": None, "why": f"measured on fewer than {PROMPTS} prompts of each task"}
    return {"benchmark_overhead": {"value": harness["share"], **notes}}


def repeatability(run: Run) -> Measured:
    """Run the same benchmark twice, one after the other, each from loading on: the largest relative
    difference of any method's speedup over all tasks."""
    folder = run.folder("benchmark_repeatability")
    first, second = (overall(benchmark(config(run), folder / name)) for name in ("first", "second"))
    speedups = {
        method: [part[method]["speedup"] for part in (first, second)]
        for method in first
        if method != AUTOREGRESSIVE  # 1 by definition
    }
    chosen = config(run)
    size = {"prompts": {task.name: chosen.limit for task in chosen.tasks}, "repeats": chosen.repeats}
    return {"benchmark_repeatability": {**repeated(speedups), "size": size}}


def repeated(speedups: dict[str, list[float]]) -> dict[str, Any]:
    """Return the largest relative difference between each method's two speedups."""
    differences = {method: abs(second / first - 1) for method, (first, second) in speedups.items()}
    return {"value": max(differences.values()), "differences": differences, "speedups": speedups}


def overall(summary: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rows over all tasks by method."""
    rows = summary["rows"]
    return {row["method"]: row for row in rows if row["task"] == ALL and row["context"] is None}


GROUPS = [
    Group({"benchmark_overhead": "<= 0.01"}, overhead),
    Group(
        {"benchmark_repeatability": "<= 0.05"},
        repeatability,
        size=Size({"mt_bench": PROMPTS, "gsm8k": PROMPTS}, REPEATS),
    ),
]
