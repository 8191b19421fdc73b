"""The figures of other targets in topic `flagship`, on code and chats.

Qwen2.5-Coder-0.5B-Instruct is named by --target, its drafter is the committed one. For the
1.5B the 0.5B drafts unchanged: --pair TARGET DRAFTER. Estimated minutes at full size on 2 cores:
`qwen05_accept_len_tree` 25 (nothing is timed), `qwen05_best_vs_ar` and `qwen05_best_vs_transformers` together
90 of a quiet machine; those of `qwen15_*` 50 and 400.
"""

from collections.abc import Callable, Sequence
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
DRAFTER, RECIPE = f"model_cards/{NAME}", f"recipes/{NAME}.yaml"
TASKS = {
    "humaneval": ("data/eval/humaneval.jsonl.gz", 80),
    "mbpp": ("data/eval/mbpp.jsonl", 80),
    "mt_bench": ("data/eval/mt_bench.jsonl", 80),
}
TARGET, PAIR = "--target FILE", "--pair TARGET DRAFTER"
LENGTH, SPEED, STOCK = "qwen05_accept_len_tree", "qwen05_best_vs_ar", "qwen05_best_vs_transformers"
LENGTH_15, SPEED_15, STOCK_15 = "qwen15_accept_len_tree", "qwen15_best_vs_ar", "qwen15_best_vs_transformers"
TREES_15 = [  # the fastest on the tuning prompts is used
    "chain:length=3",
    "chain:length=5",
    "eagle2:top_k=3,max_depth=4,total=8",
    "eagle2:top_k=3,max_depth=6,total=12",
    "timed",
]
TIMED = 40  # prompts of each task but MT-bench, for speeds


def where(option: str, measure: Callable[..., Measured], *names: str) -> Callable[[Run], Measured]:
    """Return a measurement of what an option of the command line names, skipped without it."""

    def measured(run: Run) -> Measured:
        given = {TARGET: [run.target] if run.target else None, PAIR: run.pair}[option]
        if not given:
            return {name: {"value": None, "skipped": f"no {option}"} for name in names}
        return measure(run, *given)

    return measured


def accept_len(run: Run, target: str) -> Measured:
    """Measure accept_len with trees of 60 nodes over all prompts of the three tasks."""
    return lengths(run, DRAFTER, target, "qwen05_accept_len", LENGTH)


def lengths(run: Run, drafter: str, target: str, folder: str, figure: str) -> Measured:
    """Count what the target accepts of a drafter's trees and chains."""
    place = run.folder(folder, target=target, drafter=drafter)
    loaded = load_bundle(drafter, target=target, dtype="bfloat16")
    chain, tree = accept_lengths(run, place, loaded, TASKS, list(TASKS))
    of_chain = {name: chain[name] for name in ("value", "interval", "tasks", "intervals")}
    return {figure: {**tree, "chain": of_chain}}


def speeds(run: Run, target: str) -> Measured:
    """Decode with the fastest tree of the recipe, plainly and by `generate`, interleaved."""
    trees = load_recipe(RECIPE).evaluate.trees
    return timed(run, DRAFTER, target, trees, "qwen05_speed", SPEED, STOCK)


def timed(
    run: Run, drafter: str, target: str, trees: Sequence[str], folder: str, faster: str, over_stock: str
) -> Measured:
    """Decode the recipe's prompts with the fastest of some trees, plainly and by `generate`, interleaved."""
    run.check_quiet()
    place = run.folder(folder, target=target, drafter=drafter)
    config = load_recipe(RECIPE).evaluate
    names = {"HumanEval": "humaneval", "MBPP": "mbpp", "MT-bench": "mt_bench"}
    full = {"HumanEval": TIMED, "MBPP": TIMED, "MT-bench": None}
    prompts = [replace(one, limit=run.prompts(quick=2, full=full[one.name])) for one in config.prompts]
    repeats = 1 if run.quick or run.limit else REPEATS
    changes = {"prompts": prompts, "trees": list(trees), "repeats": repeats, "lossless_prompts": 0}
    config = replace(config, **changes, busy=run.busy, transformers_dtype="same")
    evaluate(config, drafter, place, target=target, dtype="bfloat16")
    summary = read_json(place / "summary.json")
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

    than_plain = over("speedup") | {"repeats": row["speedup_repeats"]}
    return {faster: than_plain, over_stock: over("speedup_transformers")}


def pair_lengths(run: Run, target: str, drafter: str) -> Measured:
    """Measure accept_len of a small LM that drafts unchanged, with trees of 60 nodes."""
    return lengths(run, drafter, target, "qwen15_accept_len", LENGTH_15)


def pair_speeds(run: Run, target: str, drafter: str) -> Measured:
    """Decode with a small LM that drafts unchanged, plainly and by `generate`, interleaved."""
    return timed(run, drafter, target, TREES_15, "qwen15_speed", SPEED_15, STOCK_15)


GROUPS = [
    Group(
        {LENGTH: ">= 2.4"},
        where(TARGET, accept_len, LENGTH),
        long=True,
        size=Size({name: full for name, (_, full) in TASKS.items()}),
    ),
    Group(
        {SPEED: ">= 1.8", STOCK: ">= 2.0"},
        where(TARGET, speeds, SPEED, STOCK),
        long=True,
        size=Size({"humaneval": TIMED, "mbpp": TIMED, "mt_bench": 80}, REPEATS),
    ),
    Group(
        {LENGTH_15: ">= 2.4"},
        where(PAIR, pair_lengths, LENGTH_15),
        long=True,
        size=Size({name: full for name, (_, full) in TASKS.items()}),
    ),
    Group(
        {SPEED_15: ">= 1.8", STOCK_15: ">= 2.0"},
        where(PAIR, pair_speeds, SPEED_15, STOCK_15),
        long=True,
        size=Size({"humaneval": TIMED, "mbpp": TIMED, "mt_bench": 80}, REPEATS),
    ),
]
