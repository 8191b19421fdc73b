"""Table 4 of the C2T paper (Appendix A): EAGLE-1, EAGLE-2 and C2T at trees of one size.

python -m studies.c2t.table4 --limit 8
"""

import json
from argparse import Namespace
from collections.abc import Sequence

from drafttrain.data.config import PromptSet
from drafttrain.data.prompts import read_prompts, spread
from drafttrain.evaluation.sweep import sweep
from studies.arguments import run, start


def prompts_file(args: Namespace) -> PromptSet:
    """Return the chosen first turns as a file, as sweeps read them."""
    path = args.out / "prompts.jsonl"
    prompts = spread(read_prompts(args.prompts), args.limit)
    path.write_text("".join(json.dumps({"id": p.id, "prompt": p.turns[0]}) + "\n" for p in prompts))
    return PromptSet("MT-bench", str(path))


def study(args: Namespace) -> None:
    """Sweep EAGLE-2 at EAGLE-1's 25 nodes and at 60, and C2T."""
    trees = ["eagle1", "eagle2:top_k=10,max_depth=6,total=25", "eagle2:top_k=10,max_depth=6,total=60"]
    trees += [f"c2t:beta={beta}" for beta in (0.2, 0.1, 0.05, 0.03)]
    sweep(
        args.bundle,
        prompts_file(args),
        trees,
        args.out / "sizes",
        max_new_tokens=args.new_tokens,
        classifier=args.classifier,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Measure Table 4; return the exit status."""
    return run(
        study, __doc__, argv, ("bundle", "classifier", "prompts", "limit", "new_tokens"), out="runs/c2t"
    )


if __name__ == "__main__":
    start(main)
