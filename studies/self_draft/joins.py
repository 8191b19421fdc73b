"""Join a bundle's n-grams and drafter: when to leave the drafter out, and which candidates to add.

    python -m studies.self_draft.joins

Prints tokens per second over plain decoding, accept_len and draft tokens sent per step of `timed`, of the
n-grams alone and of both, by the sum of probabilities above which the drafter is not run (`sure`) and the
least probability of a candidate (`least`). Methods take turns, prompt by prompt.
"""

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from drafttrain.bundle import load_bundle
from drafttrain.data.prompts import Task, read_prompts, spread
from drafttrain.evaluation.measure import MeasurementLog, autoregressive, drafting, measure
from drafttrain.evaluation.metrics import AUTOREGRESSIVE, ratio, ratio_interval, tabulate
from drafttrain.kernels.machine import describe_machine
from drafttrain.utils.files import fingerprint
from drafttrain.utils.provenance import content_hash, git_commit
from drafttrain.utils.writing import write_json
from studies import arguments

POLICIES = ("timed", "pct:width=3,max_depth=6,min_confidence=0.05")
SURE = (1.0, 2.0, math.inf)
LEAST = (0.1, 0.2)
REPEATS = 3


def study(args: Namespace) -> None:
    bundle = load_bundle(args.bundle, args.target, args.dtype)
    target = bundle.target
    ways = {"ngram": bundle.proposer("ngram")}
    for policy in POLICIES:
        ways[policy] = bundle.proposer(policy)
        for sure, least in product(SURE, LEAST):  # each with a policy of its own, which follows its rate
            both = bundle.proposer(f"ngram+{policy}")
            ways[f"ngram+{policy}, sure {sure:g}, least {least:g}"] = replace(both, sure=sure, least=least)
    methods = {name: drafting(target, proposer) for name, proposer in ways.items()}
    prompts = Task("tuning", spread(read_prompts(args.prompts), args.limit))
    key = fingerprint([content_hash(args.bundle), git_commit(), args.new_tokens, list(methods)])
    log = MeasurementLog(args.out / "joins.jsonl", key)
    measured = measure(
        target, {AUTOREGRESSIVE: autoregressive(target), **methods}, prompts, log, args.new_tokens, REPEATS
    )
    rows = {}
    for name, row in tabulate(measured).items():
        rows[name] = {
            "speedup": ratio(measured, AUTOREGRESSIVE, name),
            "interval": ratio_interval(measured, AUTOREGRESSIVE, name),
            "tokens_per_second": row.tokens_per_second,
            "accept_len": row.accept_len,
            "sent": row.verify_per_step,
        }
        counts = f"accept_len {row.accept_len:.2f}, sent {row.verify_per_step:.1f}"
        print(f"{name}: {rows[name]['speedup']:.3f}, {counts}", flush=True)
    machine = describe_machine(target.device, target.dtype)
    write_json(args.out / "joins_summary.json", {"rows": rows, "machine": machine, "commit": git_commit()})


def main(argv: Sequence[str] | None = None) -> int:
    names = ("bundle", "target", "prompts", "limit", "new_tokens", "dtype")
    defaults = {"prompts": "data/tuning_prompts.jsonl", "limit": 16}
    return arguments.run(study, __doc__, argv, names, "docs/results/raw/self_draft", **defaults)


if __name__ == "__main__":
    arguments.start(main)
