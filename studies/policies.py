"""Growth policies against each other: each is tuned on prompts of its own, and only then compared."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from drafttrain.bundle import Bundle
from drafttrain.data.prompts import Task
from drafttrain.evaluation.measure import (
    Measurement,
    MeasurementLog,
    autoregressive,
    drafting,
    measure,
    transformers_generate,
)
from drafttrain.evaluation.metrics import AUTOREGRESSIVE, TRANSFORMERS, tabulate
from drafttrain.evaluation.proposers import usable_proposers
from drafttrain.evaluation.stock import load_stock

# What each policy is tried with; the papers' own settings are among those compared, not among these.
GRIDS: dict[str, list[str]] = {
    "chain": [f"chain:length={n}" for n in (2, 3, 4, 5)],
    "vct": ["vct:width=2,depth=2", "vct:width=3,depth=2", "vct:width=2,depth=3"],
    "cape": [f"cape:max_depth={n}" for n in (3, 4, 5)],
    "eagle2": [
        f"eagle2:top_k={k},max_depth={depth},total={total}"
        for k, depth, total in (
            (2, 3, 5),
            (3, 3, 6),
            (3, 4, 8),
            (3, 5, 10),
            (4, 4, 10),
            (4, 5, 12),
            (4, 6, 16),
        )
    ],
    "pct": [  # as published: nodes are expanded from the measured s_d / s_t on
        "pct:width=2,max_depth=6,min_confidence=0.05",
        "pct:width=3,max_depth=6,min_confidence=0.05",
        "pct:width=3,max_depth=10,min_confidence=0.02",
        "pct:width=5,max_depth=10,min_confidence=0.03",
    ],
    "pct-tuned": [  # from a threshold that is chosen with the rest
        "pct:width=3,max_depth=8,min_confidence=0.08,threshold=0.12",
        "pct:width=2,max_depth=8,min_confidence=0.1,threshold=0.16",
        "pct:width=3,max_depth=8,min_confidence=0.06,threshold=0.16",
        "pct:width=3,max_depth=8,min_confidence=0.1,threshold=0.22",
    ],
    "timed": ["timed:width=3", "timed:width=4", "timed:width=6"],
}
EAGLE2_LARGE = "EAGLE-2 (50 nodes)"
PCT_LARGE, PCT_LARGE_TUNED = "PCT (published)", "PCT tuned (large)"
LARGE = {
    EAGLE2_LARGE: "eagle2:top_k=10,max_depth=6,total=50",  # as the EDD paper runs it
    PCT_LARGE: "pct:width=5,max_depth=10,min_confidence=0.01",  # as published, costs of this machine
    # chosen on held-out chats (docs/experiments/decoding.md): six tenths of EAGLE-2's nodes
    PCT_LARGE_TUNED: "pct:width=10,max_depth=10,min_confidence=0.0075,threshold=0.0075",
    # with the s_d and s_t that the paper has for 7B (appendix B)
    "PCT (costs of 7B)": (
        "pct:width=5,max_depth=10,min_confidence=0.01,draft_seconds=0.0011,verify_seconds=0.0298"
    ),
}


def tune(
    loaded: Bundle,
    task: Task,
    log: MeasurementLog,
    max_new_tokens: int,
    grids: dict[str, list[str]] = GRIDS,
    on_turn: Callable[[], None] = lambda: None,
) -> tuple[dict[str, str], dict[str, float]]:
    """Return the fastest setting of each policy on the tuning prompts, and tokens per second of all that was
    tried, interleaved."""
    proposers = usable_proposers(loaded, [tree for trees in grids.values() for tree in trees])
    methods = {tree: drafting(loaded.target, proposer) for tree, proposer in proposers.items()}
    rows = tabulate(measure(loaded.target, methods, task, log, max_new_tokens, on_turn=on_turn))
    speeds = {tree: row.tokens_per_second for tree, row in rows.items()}
    usable = {policy: [tree for tree in trees if tree in speeds] for policy, trees in grids.items()}
    return {policy: max(trees, key=speeds.__getitem__) for policy, trees in usable.items() if trees}, speeds


def compare(
    loaded: Bundle,
    trees: dict[str, str],
    tasks: Sequence[Task],
    log: MeasurementLog,
    max_new_tokens: int,
    repeats: int,
    on_turn: Callable[[], None] = lambda: None,
) -> dict[str, list[Measurement]]:
    """Decode every prompt of every task by plain decoding, `transformers` in its faster dtype, and every
    tree, interleaved.

    Args:
        trees: by the names under which they are reported.

    Returns:
        measurements by task.
    """
    target = loaded.target
    prompt = tasks[0].prompts[0].token_ids(target.tokenizer)
    stock = load_stock(target, True, prompt, log.path.parent)  # where the choice is kept
    methods = {
        AUTOREGRESSIVE: autoregressive(target),
        TRANSFORMERS: transformers_generate(target, model=stock.model),
    }
    methods |= {name: drafting(target, loaded.proposer(tree)) for name, tree in trees.items()}
    options: dict[str, Any] = {"repeats": repeats, "on_turn": on_turn}
    return {task.name: measure(target, methods, task, log, max_new_tokens, **options) for task in tasks}


def table(measurements: Sequence[Measurement]) -> dict[str, dict[str, Any]]:
    """Return a row for each method."""
    return {method: asdict(row) for method, row in tabulate(measurements).items()}
