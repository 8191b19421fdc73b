"""Compare what a decoding step spends where by the package of an earlier commit and by the present one.

    python -m studies.step_parts --against 3cee9c9~1

Both decode the same prompts with the same trees (`timed` with costs written down here), in processes that
take turns. Prints milliseconds per step in the target, the drafter, the tree policy and the loop: medians of
the rounds, of which each counts the best of a prompt's three repeats.
"""

import json
import os
import re
import statistics
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

import torch

from drafttrain.kernels.build import variant
from drafttrain.kernels.machine import describe_machine
from drafttrain.utils.errors import UserError
from drafttrain.utils.provenance import git_commit
from drafttrain.utils.writing import write_json
from studies import ROOT, arguments
from studies.rebuild_speed import checkout, median_interval

PARTS = ("target", "drafter", "tree policy", "loop")
WORKER = """
import json, sys
from drafttrain.bundle import load_bundle
from drafttrain.data.prompts import read_prompts
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import TreeProposer
from drafttrain.trees.costs import AcceptanceCurve, CostCurve
from drafttrain.trees.timed import TimedPolicy

bundle, prompts, limit, new_tokens = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
loaded = load_bundle(bundle)
draft = CostCurve((1, 2, 4, 8, 16), (0.0004, 0.00042, 0.0005, 0.0007, 0.0011))
verify = CostCurve((1, 4, 8, 16, 32), (0.0095, 0.0098, 0.0105, 0.0125, 0.018))
shares = AcceptanceCurve((-8.0, -4.0, -2.0, -1.0, 0.0), (0.0, 0.02, 0.13, 0.36, 0.98))
policy = TimedPolicy(draft, verify, 200.0, (0.65,), shares, follow=0.0)
proposer = TreeProposer(loaded.drafter, policy)
parts, steps, tokens, texts = {}, 0, 0, []
for prompt in read_prompts(prompts, limit):
    ids = prompt.token_ids(loaded.target.tokenizer)
    runs = [decode_all(loaded.target, proposer, [ids], new_tokens) for _ in range(4)][1:]
    texts.append(runs[0][0])
    steps, tokens = steps + runs[0][1].steps, tokens + runs[0][1].new_tokens
    for name, seconds in {
        "target": lambda s: s.verify_seconds,
        "drafter": lambda s: s.draft_model_seconds,
        "tree policy": lambda s: s.draft_seconds - s.draft_model_seconds,
        "loop": lambda s: s.other_seconds,
    }.items():
        parts[name] = parts.get(name, 0.0) + min(seconds(stats) for _, stats in runs)
ms = {name: 1e3 * seconds / steps for name, seconds in parts.items()}
print(json.dumps({"ms": ms, "steps": steps, "texts": texts}))
"""


def measure(tree: Path, args: Namespace) -> dict:
    """Run one round with the package in this folder.

    Raises:
        UserError: it fails.
    """
    given = (ROOT / args.bundle, ROOT / args.prompts, args.limit, args.new_tokens)
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    command = [sys.executable, "-c", WORKER, *map(str, given)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise UserError(f"{tree}: must decode and end with 0, got {done.returncode} ({last})")
    return json.loads(done.stdout.strip().rpartition("\n")[2])


def study(args: Namespace) -> None:
    rounds: list[dict[str, dict]] = []
    same: list[bool] = []  # a kernel may have come to round otherwise
    with checkout(args.against) as tree:
        sides = [("before", tree), ("after", ROOT)]
        for side in sides:  # compiles kernels
            measure(side[1], args)
        for i in range(args.repeats):
            rounds.append({name: measure(place, args) for name, place in (sides if i % 2 else sides[::-1])})
            texts = zip(*(rounds[-1][name].pop("texts") for name, _ in sides), strict=True)
            same += [one == other for one, other in texts]
    for part in PARTS:
        ms = [statistics.median(one[side]["ms"][part] for one in rounds) for side in ("before", "after")]
        print(f"{part}: {ms[0]:.2f} -> {ms[1]:.2f} ms a step")
    whole = [{side: sum(one[side]["ms"].values()) for side in one} for one in rounds]
    ratios = [one["before"] / one["after"] for one in whole]
    print(f"steps per second, after / before: {statistics.median(ratios):.3f} {median_interval(ratios)}")
    print(f"texts that are the same: {sum(same)} of {len(same)}")
    machine = {**describe_machine(torch.device("cpu"), torch.bfloat16), "kernels": variant()}
    facts = {"against": args.against, "commit": git_commit(), "machine": machine, "same_texts": same}
    name = re.sub(r"\W", "-", args.against)
    write_json(args.out / f"step_parts_{name}_{variant()}.json", {"rounds": rounds, **facts})


def main(argv: Sequence[str] | None = None) -> int:
    names = ("bundle", "prompts", "limit", "new_tokens", "repeats", "against")
    defaults = {"prompts": "data/tuning_prompts.jsonl", "limit": 6, "repeats": 7}
    return arguments.run(study, __doc__, argv, names, "docs/results/raw/machine", **defaults)


if __name__ == "__main__":
    arguments.start(main)
