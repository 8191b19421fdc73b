"""Choose width, children, layers and static tree for paced ranks on tuning prompts, by counts.

Paced stages take the same time for few nodes as for many, so that the seconds of a text follow from its trees
(`drafttrain/pipeline/simulate.py`), and no ranks are needed to compare them.
"""

from collections.abc import Sequence
from typing import Any

from drafttrain.pipeline.outlook import KnownText
from drafttrain.pipeline.replay import replay, replay_policy
from drafttrain.pipeline.simulate import Machines, pipedec_jobs, run, stpp_jobs, total_seconds
from drafttrain.trees.costs import CostCurve
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.parse import parse_policy

SHAPES = ((4, 4), (8, 8), (16, 8), (16, 16))  # width and children
SEVERAL = (2, 3, 4)  # layers of a timestep (ours); the paper adds one
NODES = 32  # that enter a stage at once, of trees in flight as of static ones
BEST_FIRST = ((16, 16, 1), (32, 16, 1), (16, 16, 2), (8, 16, 4))  # width, children, layers of ours
NAME = "width {}, children {}, layers {}"
TREES = (
    "chain:length=4",
    "chain:length=6",
    "eagle2:top_k=4,max_depth=4,total=15",
    "eagle2:top_k=8,max_depth=4,total=31",
    "eagle2:top_k=8,max_depth=6,total=31",
    "eagle2:top_k=8,max_depth=8,total=31",
)


def constant(ms: float) -> CostCurve:
    """Return a device that takes the same time for all sizes."""
    return CostCurve((1, 32), (ms / 1e3, ms / 1e3))


def choose(
    drafter: Drafter,
    texts: Sequence[KnownText],
    stages: int,
    stage_ms: float,
    draft_ms: float,
    layers: Sequence[int] = (1,),
    best_first: bool = False,
) -> dict[str, Any]:
    """Return the keys of the fastest tree in flight and of the fastest static tree.

    Args:
        layers: of a timestep that are tried.
        best_first: try best-first trees, with layers of their own.

    Returns:
        `width`, `children`, `layers`, `best_first` and `tree`; `ms` per token of all that were compared.
    """
    machines = Machines(
        [constant(stage_ms)] * stages, [lambda tokens: 0.0] * (stages - 1), constant(draft_ms)
    )
    tokens, ms = sum(len(text.answer) - 1 for text in texts), {}
    shapes = [(*shape, count) for count in layers for shape in SHAPES if count * shape[0] <= NODES]
    shapes = list(BEST_FIRST) if best_first else shapes
    ours = {"skip_lost": not best_first, "best_first": best_first}
    for shape in shapes:
        traces = [  # a stage takes as long for any number of nodes
            replay(drafter, t.prompt, t.answer, t.tapped, stages, *shape, **ours, limit=t.limit)
            for t in texts
        ]
        seconds = sum(total_seconds(run([pipedec_jobs(machines, trace)])) for trace in traces)
        ms[NAME.format(*shape)] = 1e3 * seconds / tokens
    for tree in TREES:
        seconds = 0.0
        for text in texts:
            rounds = replay_policy(drafter, text.prompt, text.answer, text.tapped, parse_policy(tree))
            jobs = stpp_jobs(machines, [(one.drafted, one.nodes) for one in rounds])
            seconds += total_seconds(run([jobs]))
        ms[tree] = 1e3 * seconds / tokens
    best = min(shapes, key=lambda shape: ms[NAME.format(*shape)])
    found = dict(zip(("width", "children", "layers"), best))
    return {**found, "best_first": best_first, "tree": min(TREES, key=ms.__getitem__), "ms": ms}
