"""Figure 6 of the EDD paper: tau and drafted nodes of PCT by its width, the children of an expanded node.

python -m studies.edd.figure6 --limit 6
"""

import json
from argparse import Namespace
from collections.abc import Sequence

from matplotlib.figure import Figure

from drafttrain.data.prompts import Task, read_prompts, spread
from drafttrain.evaluation.measure import drafting, measure
from drafttrain.evaluation.metrics import tabulate
from studies import save_figure
from studies.arguments import run, start
from studies.edd.trees import NAMES, load, open_log, write


def study(args: Namespace) -> None:
    """Measure PCT's accept_len and nodes per tree by the number of children of an expanded node."""
    loaded, widths = load(args), range(1, 9)
    trees = {str(n): f"pct:width={n},max_depth=10,min_confidence=0.01" for n in widths}
    methods = {n: drafting(loaded.target, loaded.proposer(tree)) for n, tree in trees.items()}
    task = Task("MT-bench", spread(read_prompts(args.prompts), args.limit))
    rows = tabulate(measure(loaded.target, methods, task, open_log(args, "width"), args.new_tokens))
    found = {n: {"accept_len": r.accept_len, "nodes": r.verify_per_step} for n, r in rows.items()}
    write(args.out / "width.json", json.dumps(found, indent=1) + "\n")
    figure = Figure(figsize=(6, 4))
    left = figure.subplots()
    left.plot(widths, [row["accept_len"] for row in found.values()], marker=".", color="C0")
    left.set_xlabel("children of an expanded node")
    left.set_ylabel("accept_len", color="C0")
    right = left.twinx()
    right.plot(widths, [row["nodes"] for row in found.values()], marker=".", color="C1")
    right.set_ylabel("drafted nodes per tree", color="C1")
    save_figure(figure, args.out / "width.png")
    print(args.out / "width.png")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure Figure 6; return the exit status."""
    return run(study, __doc__, argv, (*NAMES, "prompts", "resume"), out="runs/trees")


if __name__ == "__main__":
    start(main)
