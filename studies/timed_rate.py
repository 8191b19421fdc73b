"""Let the rate to beat of `timed` follow what decoding reaches, or keep the calibrated one.

    python -m studies.timed_rate

Begins at the calibrated rate and at others, as a calibration of faster or slower minutes has them, and
follows it at once, more strictly, or not at all. Prints tokens per second as ratios over plain decoding, the
geometric mean over prompts, and accept_len. Methods take turns, prompt by prompt.
"""

import statistics
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

from drafttrain.bundle import load_bundle
from drafttrain.data.prompts import read_prompts, spread
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer, TreeProposer
from drafttrain.kernels.machine import describe_machine
from drafttrain.utils.provenance import git_commit
from drafttrain.utils.writing import write_json
from studies import arguments

TREE = "timed:width=3"
BEGUN = (0.6, 1.0, 1.6)  # times the calibrated rate
FOLLOW = (0.0, 1.0, 1.3, 1.6)


def study(args: Namespace) -> None:
    bundle = load_bundle(args.bundle, args.target, args.dtype)
    target, calibrated = bundle.target, bundle.proposer(TREE)
    policy = calibrated.policy
    ways = {
        (begun, follow): TreeProposer(
            calibrated.drafter, replace(policy, rate=begun * policy.rate, follow=follow)
        )
        for begun in BEGUN
        for follow in FOLLOW
    }
    prompts = spread(read_prompts(args.prompts), args.limit)
    tokens = [prompt.token_ids(target.tokenizer) for prompt in prompts]
    for proposer in (NoProposer(), calibrated):
        decode_all(target, proposer, tokens[:1], 16)
    order, rows = [None, *ways], []
    for number, ids in enumerate(tokens):
        turn = number % len(order)
        for way in order[turn:] + order[:turn]:
            stats = decode_all(target, ways[way] if way else NoProposer(), [ids], args.new_tokens)[1]
            begun, follow = way or (None, None)
            speed = {"tokens_per_second": stats.tokens_per_second, "accept_len": stats.accept_len}
            speed |= {"tokens": stats.new_tokens - stats.prompts, "steps": stats.steps}
            rows.append({"prompt": prompts[number].id, "begun": begun, "follow": follow, **speed})
    plain = {row["prompt"]: row["tokens_per_second"] for row in rows if row["begun"] is None}
    for begun, follow in ways:
        own = [row for row in rows if (row["begun"], row["follow"]) == (begun, follow)]
        ratio = statistics.geometric_mean(row["tokens_per_second"] / plain[row["prompt"]] for row in own)
        length = sum(row["tokens"] for row in own) / sum(row["steps"] for row in own)
        print(f"rate x {begun}, follow {follow}: {ratio:.3f}, accept_len {length:.2f}", flush=True)
    made = {
        "rate": policy.rate,
        "machine": describe_machine(target.device, target.dtype),
        "commit": git_commit(),
    }
    write_json(args.out / "timed_rate.json", {"rows": rows, **made})


def main(argv: Sequence[str] | None = None) -> int:
    names = ("bundle", "target", "prompts", "limit", "new_tokens", "dtype")
    defaults = {"prompts": "data/tuning_prompts.jsonl", "limit": 14}
    return arguments.run(study, __doc__, argv, names, "docs/results/raw/machine", **defaults)


if __name__ == "__main__":
    arguments.start(main)
