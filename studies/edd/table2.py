"""Table 2 of the EDD paper, and the rows about trees of its Table 3: VCT, CAPE, EAGLE-2 and PCT by task.

    python -m studies.edd.table2 --limit 3

Speedup over plain decoding, alpha (accept_rate) and tau (accept_len), as `table2.md`. PCT takes its costs
from the bundle's calibration, so calibrate the bundle on this machine first.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafttrain.evaluation.measure import autoregressive, drafting, measure
from drafttrain.evaluation.metrics import AUTOREGRESSIVE, Row, tabulate
from drafttrain.inference.proposer import TreeProposer
from drafttrain.trees.expand import add_children
from drafttrain.trees.interface import TreePolicy
from drafttrain.trees.tree import TokenTree, marked_nodes
from drafttrain.utils.machine import check_quiet
from studies.arguments import MT_BENCH, run, start, tasks
from studies.edd.trees import NAMES, TREES, load, open_log, write

TASKS = {  # name: file, turns
    "MT-bench": (MT_BENCH, 2),
    "GSM8K": ("data/eval/gsm8k_test_80.jsonl", 1),
    "summarization": ("data/eval/summarization.jsonl", 1),  # for CNN/DM, which may not be redistributed
    "HumanEval": ("data/eval/humaneval.jsonl.gz", 1),
}


@dataclass
class OwnConfidencePolicy(TreePolicy):
    """Table 3, "w/o expected time gain": a node's own confidence alone decides whether it is expanded,
    and not its path's. The paper gives no threshold; from 0.5 on, at most one child of a node passes.
    """

    threshold: float = 0.5
    width: int = 5
    max_depth: int = 10
    min_confidence: float = 0.01

    def grow(self, drafter, state: object, root: torch.Tensor) -> TokenTree:
        """Draft trees below root tokens [B]."""
        tree = TokenTree.root_only(root)
        for depth in range(self.max_depth):
            sure = (tree.log_probs.exp() >= self.threshold) & (tree.depths == depth) & tree.valid  # [B, n]
            frontier, counts = marked_nodes(sure)
            if not frontier.shape[1]:
                break
            tree = add_children(drafter, state, tree, frontier, counts, self.width)
        return tree.select(tree.joint_log_probs().exp() >= self.min_confidence)


def study(args: Namespace) -> None:
    """Measure speedup, accept_rate (alpha) and accept_len (tau) of each tree on each task, one run each."""
    loaded = load(args)
    policies: dict[str, TreePolicy] = {name: loaded.proposer(tree).policy for name, tree in TREES.items()}
    policies["PCT w/o expected gain"] = OwnConfidencePolicy()
    methods = {AUTOREGRESSIVE: autoregressive(loaded.target)}
    methods |= {
        name: drafting(loaded.target, TreeProposer(loaded.drafter, policy))
        for name, policy in policies.items()
    }
    log, rows = open_log(args, "table2"), {}
    if warning := check_quiet(refuse=False):
        print(f"timings will be poor: {warning}", file=sys.stderr)
    for task in tasks(args, TASKS):
        rows[task.name] = tabulate(measure(loaded.target, methods, task, log, args.new_tokens))
        print(f"{task.name}: done", file=sys.stderr)
    write(args.out / "table2.md", markdown(rows, args.new_tokens))


def markdown(rows: dict[str, dict[str, Row]], new_tokens: int) -> str:
    """Format Table 2 from the rows of each task, its baseline left out."""
    policies = [name for name in next(iter(rows.values())) if name != AUTOREGRESSIVE]
    head = "".join(f" {task}: speedup | α | τ | repeated | nodes |" for task in rows)
    lines = [f"| tree |{head}", "|---|" + "---|" * (5 * len(rows))]
    for name in policies:
        cells = [
            f"{row.speedup:.2f} | {row.accept_rate:.2f} | {row.accept_len:.2f} | "
            f"{row.repetition:.0%} | {row.verify_per_step:.1f}"
            for row in (part[name] for part in rows.values())
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    prompts = ", ".join(f"{task} {part[AUTOREGRESSIVE].prompts}" for task, part in rows.items())
    return "\n".join(lines) + f"\n\nAnswers: {prompts}; greedy, at most {new_tokens} tokens.\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure Table 2; return the exit status."""
    return run(study, __doc__, argv, (*NAMES, "tasks", "resume"), out="runs/trees")


if __name__ == "__main__":
    start(main)
