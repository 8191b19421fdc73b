"""Figure 8 of the Self-Draft paper: without corpus, text, recycling or branches, by category of MT-bench.

    python -m studies.self_draft.figure8 --limit 16

The prompts need a `category`, as those of MT-bench have.
"""

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from drafttrain.data.prompts import read_prompts, spread
from drafttrain.inference.stats import DecodeStats
from studies.arguments import start
from studies.self_draft.bench import FULL, Bench, run_study

ABLATIONS: dict[str, tuple[dict[str, Any], bool]] = {  # what is changed, and whether the corpus stays
    "everything": ({}, True),
    "without corpus": ({}, False),
    "without text": ({"context": False}, True),
    "without recycling": ({"recycle": 0}, True),
    "without branches": ({"branches": 0}, True),
    "branches and corpus (the paper)": ({"context": False, "recycle": 0}, True),
    "text and corpus (prompt lookup with a corpus)": ({"recycle": 0, "branches": 0}, True),
    "text alone": ({"recycle": 0, "branches": 0}, False),
}


def ablation(bench: Bench, args: Namespace) -> dict[str, Any]:
    """Measure accept_len of each configuration, on all prompts and by category of MT-bench."""
    prompts = spread(read_prompts(args.prompts), args.limit)
    lines = map(json.loads, Path(args.prompts).read_text(encoding="utf-8").splitlines())
    category = {str(row["question_id"]): row["category"] for row in lines}
    names = sorted({category[prompt.id] for prompt in prompts})
    found: dict[str, Any] = {}
    print(f"{'':46} all   " + " ".join(f"{name[:8]:8}" for name in names))
    for title, (change, corpus) in ABLATIONS.items():
        row, total, by_source = {}, DecodeStats(), {}
        for name in names:
            proposer = bench.proposer(replace(FULL, **change), corpus)
            chosen = [prompt for prompt in prompts if category[prompt.id] == name]
            stats = bench.decode(proposer, chosen, args.new_tokens)
            row[name], total = stats.accept_len, total + stats
            for source, number in proposer.accepted.items():
                by_source[source] = by_source.get(source, 0) + number
        found[title] = {"accept_len": total.accept_len, "categories": row, "accepted_by_source": by_source}
        print(f"{title:46} {total.accept_len:.2f}  " + " ".join(f"{row[name]:8.2f}" for name in names))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure Figure 8; return the exit status."""
    return run_study(ablation, __doc__, argv, ("prompts",))


if __name__ == "__main__":
    start(main)
