"""Choose blocks, width, children and static tree for a pipeline on tuning prompts.

    python -m studies.pipedec.tuning --recipe recipes/pipeline/smollm2-2.yaml --limit 6

For each cut of the target into two stages: PP, STPP with some trees, and PipeDec with some widths and numbers
of children, with trees of the paper and best-first ones, prompt by prompt in turn. Tokens per second go to
tuning.json in --out, the fastest of each mode, and of the best-first trees, at its end.
"""

import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from drafttrain.pipeline.config import PipelineConfig
from drafttrain.pipeline_decoder import PipelineDecoder
from drafttrain.run.pipeline import end_with_parent, start
from drafttrain.trees.parse import parse_policy
from drafttrain.utils.writing import write_json
from studies import arguments
from studies.pipedec.modes import MODES, settings

RAW = "tuning.json"
SHAPES = ((1, 1), (2, 2), (3, 3), (4, 4))  # width and children
BEST_FIRST = ((4, 8, 1), (2, 4, 2), (4, 8, 2), (2, 4, 3), (3, 8, 3), (2, 8, 4))  # and layers
TREES = ("chain:length=3", "chain:length=4", "chain:length=5", "eagle2:top_k=3,max_depth=4,total=8")
MOVES = (-9, -6, -3, 0, 3)  # blocks that the first stage has more than where weights are balanced


def study(args: Namespace) -> None:
    config = settings(args)
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "studies.pipedec.tuning", *sys.argv[1:]]
        if start(config.world_size, command):
            sys.exit(2)
        return
    end_with_parent()
    with PipelineDecoder(replace(config, mode="pipedec")) as pipeline:
        rows = [row for move in MOVES for row in measure(pipeline, config, move)]
    if pipeline.rank == 0:
        kinds = {mode: [r for r in rows if r["mode"] == mode and "best_first" not in r] for mode in MODES}
        kinds["best_first"] = [r for r in rows if "best_first" in r]
        best = {kind: max(own, key=lambda r: r["rate"]) for kind, own in kinds.items()}
        write_json(args.out / RAW, {"machine": pipeline.machine(), "rows": rows, "best": best})
        for kind, row in best.items():
            print(f"{kind}: {row['rate']:.1f} tokens/s with {row}")


def measure(pipeline: PipelineDecoder, config: PipelineConfig, move: int) -> list[dict[str, Any]]:
    """Decode all prompts in all ways with one cut; return tokens per second of each."""
    first, second = pipeline.blocks
    decoder = pipeline.recut([first + move, second - move])
    ways: list[dict[str, Any]] = [{"mode": "pp"}]
    ways += [{"mode": "stpp", "tree": tree} for tree in TREES]
    ways += [{"mode": "pipedec", "width": width, "children": children} for width, children in SHAPES]
    names = "width", "children", "layers"
    ways += [{"mode": "pipedec", **dict(zip(names, one)), "best_first": True} for one in BEST_FIRST]
    seconds, tokens = [0.0] * len(ways), [0] * len(ways)
    for number, (_, request) in enumerate(pipeline.prompts):
        for turn in range(len(ways)):
            i = (turn + number) % len(ways)
            own = ways[i]
            if decoder.me.drafter is not None and "tree" in own:
                decoder.me.policy = parse_policy(own["tree"])
            shape = {key: own[key] for key in (*names, "best_first") if key in own}
            depth = parse_policy(own["tree"]).max_depth if "tree" in own else request.depth
            began = time.perf_counter()
            output = decoder.decode(own["mode"], replace(request, **shape, depth=depth))
            if number:  # the first prompt warms
                seconds[i] += time.perf_counter() - began
                tokens[i] += len(output.tokens)
    cut = decoder.config.stages.blocks
    return [{**own, "cut": cut, "rate": n / s} for own, n, s in zip(ways, tokens, seconds)]


def main(argv: Sequence[str] | None = None) -> int:
    return arguments.run(study, __doc__, argv, ("recipe", "limit", "set"), "runs/pipedec/tuning")


if __name__ == "__main__":
    arguments.start(main)
