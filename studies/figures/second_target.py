"""The figures of a second target in topic `flagship`: Qwen2.5-Coder-0.5B-Instruct on code and chats.

Its weights are named by --target, its drafter is the one that its recipe has made here. Estimated minutes at
full size on 2 cores: `qwen05_accept_len_tree` 25 (nothing is timed), `qwen05_best_vs_ar` and
`qwen05_best_vs_transformers` together 90 of a quiet machine.
"""

from collections.abc import Callable
from dataclasses import replace

from drafttrain.bundle import load_bundle
from drafttrain.evaluation.config import ALL
from drafttrain.evaluation.evaluate import evaluate
from drafttrain.run.recipe import load_recipe
from drafttrain.utils.files import read_json
from studies.figures.flagship import accept_lengths
from studies.figures.machine_setting import REPEATS
from studies.goals import Group, Measured, Run, Size

NAME = "qwen2.5-coder-0.5b-edd-anchored"
DRAFTER, RECIPE = f"runs/{NAME}/bundle", f"recipes/{NAME}.yaml"  # the recipe makes it
TASKS = {
    "humaneval": ("data/eval/humaneval.jsonl.gz", 80),
    "mbpp": ("data/eval/mbpp.jsonl", 80),
    "mt_bench": ("data/eval/mt_bench.jsonl", 80),
}
LENGTH, SPEED, STOCK = "qwen05_accept_len_tree", "qwen05_best_vs_ar", "qwen05_best_vs_transformers"
TIMED = 40  # prompts of each task but MT-bench, for speeds


def of_target(measure: Callable[[Run, str], Measured], *names: str) -> Callable[[Run], Measured]:
    """Return a measurement that is skipped without --target."""

    def measured(run: Run) -> Measured:
        if run.target is None:
            return {name: {"value": None, "skipped": "no --target FILE"} for name in names}
        return measure(run, run.target)

    return measured


def accept_len(run: Run, target: str) -> Measured:
    """accept_len with trees of 60 nodes over all prompts of the three tasks."""
    loaded = load_bundle(DRAFTER, target=target, dtype="bfloat16")
    chain, tree = accept_lengths(run, run.folder("qwen05_accept_len"), loaded, TASKS, list(TASKS))
    of_chain = {name: chain[name] for name in ("value", "interval", "tasks", "intervals")}
    return {LENGTH: {**tree, "chain": of_chain}}


def speeds(run: Run, target: str) -> Measured:
    """Decode with the fastest tree of the recipe, plainly and by `generate`, interleaved."""
    run.check_quiet()
    folder, config = run.folder("qwen05_speed"), load_recipe(RECIPE).evaluate
    names = {"HumanEval": "humaneval", "MBPP": "mbpp", "MT-bench": "mt_bench"}
    full = {"HumanEval": TIMED, "MBPP": TIMED, "MT-bench": None}
    prompts = [replace(one, limit=run.prompts(quick=2, full=full[one.name])) for one in config.prompts]
    repeats = 1 if run.quick or run.limit else REPEATS
    config = replace(config, prompts=prompts, repeats=repeats, lossless_prompts=0, busy=run.busy)
    evaluate(config, DRAFTER, folder, target=target, dtype="bfloat16")
    summary = read_json(folder / "summary.json")
    tree, tasks = summary["tree"], summary["tasks"]
    row = tasks[ALL][tree]
    counts = {names[name]: part[tree]["prompts"] for name, part in tasks.items() if name != ALL}
    notes = {
        "tree": tree,
        "accept_len": row["accept_len"],
        "identical": row["identical"],
        "tokens_per_second": {name: one["tokens_per_second"] for name, one in tasks[ALL].items()},
        "machine": {"dtype": summary["dtype"]},
        "size": {"prompts": counts, "repeats": repeats},
        **({"flags": row["flags"]} if row["flags"] else {}),
    }

    def over(column: str) -> dict:
        of_tasks = {names[name]: part[tree][column] for name, part in tasks.items() if name != ALL}
        return {"value": row[column], "interval": row[f"{column}_interval"], "tasks": of_tasks, **notes}

    faster = over("speedup") | {"repeats": row["speedup_repeats"]}
    return {SPEED: faster, STOCK: over("speedup_transformers")}


GROUPS = [
    Group(
        {LENGTH: ">= 2.4"},
        of_target(accept_len, LENGTH),
        long=True,
        size=Size({name: full for name, (_, full) in TASKS.items()}),
    ),
    Group(
        {SPEED: ">= 1.8", STOCK: ">= 2.0"},
        of_target(speeds, SPEED, STOCK),
        long=True,
        size=Size({"humaneval": TIMED, "mbpp": TIMED, "mt_bench": 80}, REPEATS),
    ),
]
