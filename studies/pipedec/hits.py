"""Hits of trees in flight by stages, width and children (PipeDec, Figures 4 to 6 in counts).

    python -m studies.pipedec.hits --limit 8

Texts are decoded greedily once; the trees of any pipeline are then grown against them
(`drafttrain/pipeline/replay.py`), which gives the hits and timesteps of the real run. Beside them static
trees with as many layers of the same width. At the widest, trees that add as many nodes in several layers of
a timestep, and best-first ones, are grown as well (ours).
"""

import itertools
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from drafttrain.data.prompts import read_prompts, spread
from drafttrain.inference.params import SamplingParams
from drafttrain.pipeline.outlook import KnownText, known_texts
from drafttrain.pipeline.replay import replay, replay_static
from drafttrain.utils.writing import write_json
from studies import arguments
from studies.seed.pairs import Pair, load_pair

PROMPTS = "data/tuning_prompts.jsonl"
GROUPS, WIDTHS, CHILDREN = (2, 4, 7, 14, 21), (1, 2, 4, 8, 16, 32), (2, 4, 16)
OURS = ((32, 16, 1, True), *((32 // n, 16, n, best) for n in (2, 4) for best in (False, True)))


def count(
    pair: Pair,
    texts: Sequence[KnownText],
    groups: int,
    width: int,
    children: int,
    layers: int = 1,
    best_first: bool = False,
) -> dict[str, Any]:
    """Return hits and timesteps of a pipeline of some groups over all texts, and hits of static trees."""
    tokens = judged = hits = steps = nodes = static_hits = static_judged = static_nodes = rounds = 0
    for text in texts:
        known = text.prompt, text.answer, text.tapped
        how = {"best_first": best_first, "limit": text.limit}
        trace = replay(pair.drafter, *known, groups, width, children, layers, **how)
        tokens, judged = tokens + len(text.answer) - 1, judged + max(trace.tokens - 1, 0)
        hits, steps = hits + trace.hits, steps + len(trace.steps)
        nodes += sum(map(sum, (step.nodes for step in trace.steps)))
        found = replay_static(pair.drafter, *known, groups, width, children)
        static_hits, rounds = static_hits + sum(one.hits for one in found), rounds + len(found)
        static_judged += sum(one.judged for one in found)
        static_nodes += sum(one.nodes for one in found)
    return {
        "groups": groups,
        "width": width,
        "children": children,
        "layers": layers,
        "best_first": best_first,
        "tokens": tokens,
        "hit_rate": round(hits / max(judged, 1), 4),
        "timesteps_per_token": round(steps / max(tokens, 1), 4),
        "nodes_per_timestep": round(nodes / max(steps, 1), 3),
        "static_share": round(static_hits / max(static_judged, 1), 4),  # of tokens looked for
        "static_nodes": round(static_nodes / max(rounds, 1), 3),
    }


def study(args: Namespace) -> None:
    pair = load_pair("A" if args.target else "B", args.target, args.bundle, args.dtype)
    chosen = spread(read_prompts(args.prompts), args.limit)
    prompts = [prompt.token_ids(pair.target.tokenizer) for prompt in chosen]
    taps, rows = getattr(pair.drafter.config, "tapped_blocks", []), []
    texts = known_texts(pair.target, taps, prompts, args.new_tokens, SamplingParams())
    for groups, tree in itertools.product(GROUPS, (*itertools.product(WIDTHS, CHILDREN), *OURS)):
        rows.append(count(pair, texts, groups, *tree))
        print(", ".join(f"{name} {value}" for name, value in rows[-1].items()), flush=True)
        write_json(args.out / f"hits_{pair.name}.json", rows)


def main(argv: Sequence[str] | None = None) -> int:
    names = ("bundle", "target", "prompts", "limit", "new_tokens", "dtype")
    return arguments.run(study, __doc__, argv, names, "runs/pipedec", prompts=PROMPTS, dtype="bfloat16")


if __name__ == "__main__":
    arguments.start(main)
