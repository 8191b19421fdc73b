"""Seconds in which a tree in flight goes on after a token: tree, mask, and the caches of a stage and of the
drafter, which also adds the next layer (PipeDec, §3.3.3 and §3.3.4).
"""

import statistics
import time

import torch

from drafttrain.kernels.team import native_team
from drafttrain.pipeline.part import TargetPart, load_part
from drafttrain.pipeline.prediction import PredictionTree
from drafttrain.pipeline.stage import Flow, Stage
from studies.seed.pairs import Pair

LAYERS, WIDTH, CHILDREN = 21, 32, 16
BLOCKS = 2  # of a stage: SmolLM2's 30 on 14 stages
CONTEXT, ROUNDS = 128, 9


@torch.no_grad()
def upkeep(pair: Pair, place: str, rounds: int = ROUNDS) -> dict[str, float]:
    """Return the median seconds that a stage and the drafter take after a hit, on one thread: `stage` and
    `drafter` to cut the tree, `growing` to add a layer at the drafter.

    Args:
        place: folder of the pair's target.
    """
    taken: dict[str, list[float]] = {"stage": [], "drafter": [], "growing": []}
    tapped = torch.zeros(1, tapped_width(pair), dtype=pair.drafter.dtype)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with native_team(1):
            part = load_part(place, range(BLOCKS), pair.target.dtype)
            part.pack()
            for _ in range(rounds):
                stage, tree = grown(pair, part)
                token = int(tree.tree.tokens[0, 1])  # the best child of the root
                started = time.perf_counter()
                stage.advance(token)
                taken["stage"].append(time.perf_counter() - started)
                started = time.perf_counter()
                tree.advance(token, tapped)
                taken["drafter"].append(time.perf_counter() - started)
                started = time.perf_counter()
                if not tree.grow(LAYERS):
                    raise RuntimeError("the tree must grow by the layer that the root has left, got none")
                taken["growing"].append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(threads)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def grown(pair: Pair, part: TargetPart) -> tuple[Stage, PredictionTree]:
    """Return a stage and the drafter's tree with all layers in flight."""
    tokens = torch.arange(CONTEXT)
    slots = LAYERS * WIDTH + 1
    stage = Stage(part, CONTEXT + slots)
    stage.prefill(tokens)
    state = pair.drafter.new_state(1, CONTEXT + slots)
    tapped = torch.zeros(1, CONTEXT, tapped_width(pair), dtype=pair.drafter.dtype)
    pair.drafter.update(state, tokens[None], tapped, torch.tensor([CONTEXT]))
    tree = PredictionTree(pair.drafter, state, CONTEXT, WIDTH, CHILDREN)
    while (layer := tree.take()) is not None:
        stage.compute(Flow(layer.tokens, layer.parents))
        tree.expand()
        tree.grow(LAYERS)
    return stage, tree


def tapped_width(pair: Pair) -> int:
    """Return the size of the states that the drafter reads at a token."""
    return len(getattr(pair.drafter.config, "tapped_blocks", [])) * pair.target.hidden_size
