"""Figure 7 of the EDD paper (Appendix C.1): tau and tree sizes of PCT by category of MT-bench.

    python -m studies.edd.figure7 --limit 2        two prompts of each category

The prompts need a `category`, as those of MT-bench have.
"""

import json
import statistics
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from drafttrain.data.prompts import read_prompts
from drafttrain.inference.decode import decode
from studies import save_figure
from studies.arguments import run, start
from studies.edd.trees import NAMES, TREES, load, write


def study(args: Namespace) -> None:
    """Measure PCT's accept_len and the distribution of its tree sizes in each category of MT-bench."""
    loaded = load(args)
    by_id = {}
    for line in Path(args.prompts).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        by_id[str(row["question_id"])] = row["category"]
    sizes: dict[str, list[int]] = {}
    emitted: dict[str, list[int]] = {}
    counts: dict[str, int] = {}
    proposer = loaded.proposer(TREES["PCT"])
    with open(args.out / "categories.jsonl", "w", encoding="utf-8") as raw:
        for prompt in read_prompts(args.prompts):
            category = by_id[prompt.id]
            counts[category] = counts.get(category, 0) + 1
            if args.limit is not None and counts[category] > args.limit:
                continue
            ids = prompt.token_ids(loaded.target.tokenizer)
            steps = list(decode(loaded.target, proposer, [ids], args.new_tokens))[1:]
            nodes, tokens = [s.verified[0] for s in steps], [len(s.tokens[0]) for s in steps]
            raw.write(
                json.dumps({"prompt": prompt.id, "category": category, "nodes": nodes, "tokens": tokens})
            )
            raw.write("\n")
            sizes.setdefault(category, []).extend(nodes)
            emitted.setdefault(category, []).extend(tokens)
    found = {
        category: {
            "accept_len": statistics.fmean(emitted[category]),
            "nodes": dict(zip(("lower", "median", "upper"), statistics.quantiles(sizes[category], n=4))),
        }
        for category in sizes
    }
    write(args.out / "categories.json", json.dumps(found, indent=1) + "\n")
    draw(found, sizes, args.out / "categories.png")


def draw(found: dict[str, dict[str, Any]], sizes: dict[str, list[int]], path: Path) -> None:
    """Draw accept_len and the nodes of all trees by category."""
    figure = Figure(figsize=(12, 4))
    axes = figure.subplots(1, 2)
    axes[0].bar(list(found), [row["accept_len"] for row in found.values()])
    axes[0].set_ylabel("accept_len")
    axes[1].boxplot(list(sizes.values()), showfliers=False)
    axes[1].set_xticks(range(1, len(sizes) + 1), list(sizes))
    axes[1].set_ylabel("drafted nodes per tree")
    for axis in axes:
        axis.tick_params(axis="x", rotation=30)
    save_figure(figure, path)
    print(path)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure Figure 7; return the exit status."""
    return run(study, __doc__, argv, (*NAMES, "prompts"), out="runs/trees")


if __name__ == "__main__":
    start(main)
