"""The EDD paper's tables and figures about candidate trees, with a drafter and a machine of your own.

    python -m studies.trees table2        VCT, CAPE, EAGLE-2, PCT: speedup, alpha, tau by task (Tables 2, 3)
    python -m studies.trees width         tau and nodes by expansion width (Figure 6)
    python -m studies.trees categories    tau and tree sizes by MT-bench category (Figure 7)
    python -m studies.trees sample        a text with its iterations marked (Table 4)

Figure 3b, the reliability diagram, is `drafttrain calibrate`. PCT takes its costs from the bundle's
calibration, so calibrate the bundle on this machine first. Raw measurements, tables and pictures go to --out.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.figure import Figure

from drafttrain.bundle import Bundle, load_bundle
from drafttrain.data.prompts import Task, read_prompts, spread
from drafttrain.evaluation.measure import MeasurementLog, autoregressive, drafting, measure
from drafttrain.evaluation.metrics import AUTOREGRESSIVE, Row, tabulate
from drafttrain.inference.decode import decode
from drafttrain.inference.proposer import NoProposer, TreeProposer
from drafttrain.trees.expand import add_children
from drafttrain.trees.interface import TreePolicy
from drafttrain.trees.tree import TokenTree, marked_nodes
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint, save_figure
from drafttrain.utils.machine import check_quiet
from drafttrain.utils.provenance import content_hash, versions
from studies import ROOT

MT_BENCH = "data/eval/mt_bench.jsonl"
TASKS = {  # name: file, turns
    "MT-bench": (MT_BENCH, 2),
    "GSM8K": ("data/eval/gsm8k_test_80.jsonl", 1),
    "summarization": ("data/eval/summarization.jsonl", 1),  # for CNN/DM, which may not be redistributed
    "HumanEval": ("data/eval/humaneval.jsonl.gz", 1),
}
TREES = {  # in the paper's settings
    "VCT": "vct:width=3,depth=5",
    "CAPE": "cape:max_depth=5",
    "EAGLE-2": "eagle2:top_k=10,max_depth=6,total=50",
    "PCT": "pct:width=5,max_depth=10,min_confidence=0.01",
    "PCT w/o removing leaves": "pct:width=5,max_depth=10,min_confidence=0",
}
NEW_TOKENS = 96


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


def table2(loaded: Bundle, out: Path, limit: int | None, key: str) -> None:
    """Speedup, accept_rate (alpha) and accept_len (tau) of each tree on each task, one run each."""
    policies: dict[str, TreePolicy] = {name: loaded.proposer(tree).policy for name, tree in TREES.items()}
    policies["PCT w/o expected gain"] = OwnConfidencePolicy()
    methods = {AUTOREGRESSIVE: autoregressive(loaded.target)}
    methods |= {
        name: drafting(loaded.target, TreeProposer(loaded.drafter, policy))
        for name, policy in policies.items()
    }
    log = MeasurementLog(out / "table2.jsonl", key)
    rows = {}
    if warning := check_quiet(refuse=False):
        print(f"timings will be poor: {warning}", file=sys.stderr)
    for name, (path, turns) in TASKS.items():
        task = Task(name, spread(read_prompts(path), limit), turns)
        rows[name] = tabulate(measure(loaded.target, methods, task, log, NEW_TOKENS))
        print(f"{name}: done", file=sys.stderr)
    write(out / "table2.md", markdown(rows))


def markdown(rows: dict[str, dict[str, Row]]) -> str:
    """Table 2 from the rows of each task, its baseline left out."""
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
    return "\n".join(lines) + f"\n\nAnswers: {prompts}; greedy, at most {NEW_TOKENS} tokens.\n"


def width(loaded: Bundle, out: Path, limit: int | None, key: str) -> None:
    """PCT's accept_len and nodes per tree by the number of children of an expanded node."""
    widths = range(1, 9)
    trees = {str(n): f"pct:width={n},max_depth=10,min_confidence=0.01" for n in widths}
    methods = {n: drafting(loaded.target, loaded.proposer(tree)) for n, tree in trees.items()}
    task = Task("MT-bench", spread(read_prompts(MT_BENCH), limit))
    log = MeasurementLog(out / "width.jsonl", key)
    rows = tabulate(measure(loaded.target, methods, task, log, NEW_TOKENS))
    found = {n: {"accept_len": r.accept_len, "nodes": r.verify_per_step} for n, r in rows.items()}
    write(out / "width.json", json.dumps(found, indent=1) + "\n")
    figure = Figure(figsize=(6, 4))
    left = figure.subplots()
    left.plot(widths, [row["accept_len"] for row in found.values()], marker=".", color="C0")
    left.set_xlabel("children of an expanded node")
    left.set_ylabel("accept_len", color="C0")
    right = left.twinx()
    right.plot(widths, [row["nodes"] for row in found.values()], marker=".", color="C1")
    right.set_ylabel("drafted nodes per tree", color="C1")
    save_figure(figure, out / "width.png")
    print(out / "width.png")


def categories(loaded: Bundle, out: Path, limit: int | None, key: str) -> None:
    """PCT's accept_len and the distribution of its tree sizes in each category of MT-bench."""
    by_id = {}
    for line in Path(MT_BENCH).read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        by_id[str(row["question_id"])] = row["category"]
    sizes: dict[str, list[int]] = {}
    emitted: dict[str, list[int]] = {}
    counts: dict[str, int] = {}
    proposer = loaded.proposer(TREES["PCT"])
    with open(out / "categories.jsonl", "w", encoding="utf-8") as raw:
        for prompt in read_prompts(MT_BENCH):
            category = by_id[prompt.id]
            counts[category] = counts.get(category, 0) + 1
            if limit is not None and counts[category] > limit:
                continue
            ids = prompt.token_ids(loaded.target.tokenizer)
            steps = list(decode(loaded.target, proposer, [ids], NEW_TOKENS))[1:]
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
    write(out / "categories.json", json.dumps(found, indent=1) + "\n")
    figure = Figure(figsize=(12, 4))
    axes = figure.subplots(1, 2)
    axes[0].bar(list(found), [row["accept_len"] for row in found.values()])
    axes[0].set_ylabel("accept_len")
    axes[1].boxplot(list(sizes.values()), showfliers=False)
    axes[1].set_xticks(range(1, len(sizes) + 1), list(sizes))
    axes[1].set_ylabel("drafted nodes per tree")
    for axis in axes:
        axis.tick_params(axis="x", rotation=30)
    save_figure(figure, out / "categories.png")
    print(out / "categories.png")


def sample(loaded: Bundle, out: Path, limit: int | None, key: str) -> None:
    """One answer decoded without drafts, with chains of 5 and with PCT, a slash after each iteration."""
    prompt = read_prompts(MT_BENCH, limit)[0]
    ids = prompt.token_ids(loaded.target.tokenizer)
    proposers = {
        "without drafts": NoProposer(),
        "EDD, chains of 5": loaded.proposer("chain:length=5"),
        "EDD + PCT": loaded.proposer(TREES["PCT"]),
    }
    lines = [f"Prompt: {prompt.turns[0]}\n"]
    for name, proposer in proposers.items():
        steps = list(decode(loaded.target, proposer, [ids], NEW_TOKENS))
        pieces = [loaded.target.tokenizer.decode(step.tokens[0], skip_special_tokens=True) for step in steps]
        tokens = sum(len(step.tokens[0]) for step in steps)
        lines.append(
            f"{name} ({tokens} tokens in {len(steps)} iterations):\n\n    "
            + "/".join(pieces).replace("\n", "⏎")
            + "\n"
        )
    write(out / "sample.md", "\n".join(lines))


COMMANDS = {"table2": table2, "width": width, "categories": categories, "sample": sample}


def write(path: Path, text: str) -> None:
    """Puts a file in place as a whole and shows it."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
    print(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Makes what the command line asks for; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("what", choices=COMMANDS)
    parser.add_argument("--bundle", default="model_cards/smollm2-135m-edd", metavar="DIR")
    parser.add_argument("--calibration", metavar="DIR", help="default: the bundle's")
    parser.add_argument("--limit", type=int, metavar="N", help="prompts of each task (category) at most")
    parser.add_argument("--resume", action="store_true", help="go on with an interrupted run's raw data")
    parser.add_argument("--out", default="runs/trees", metavar="DIR")
    args = parser.parse_args(argv)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    try:
        loaded = load_bundle(args.bundle, dtype="bfloat16", calibration=args.calibration)
        calibration = args.calibration and content_hash(args.calibration)
        depends = [content_hash(args.bundle), calibration, TREES, NEW_TOKENS, versions()]
        key = fingerprint([*depends, torch.get_num_threads()])
        if not args.resume:
            for raw in out.glob(f"{args.what}.jsonl"):
                raw.unlink()
        COMMANDS[args.what](loaded, out, args.limit, key)
    except UserError as error:
        print(f"trees.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
