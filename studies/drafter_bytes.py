#!/usr/bin/env python
"""Decode with a drafter whose weights are bytes and with the same one in bf16, in turn:

    python -m studies.drafter_bytes --target MODEL --bundle DRAFTER [--limit 16]

Greedily, on tuning prompts: tokens of a step, tokens per second and speedup over plain decoding of both, with
trees of several sizes. DRAFTER is a bundle or a small LM that drafts unchanged.
"""

from argparse import Namespace
from collections.abc import Sequence
from unittest.mock import patch

from drafttrain.bundle import load_bundle
from drafttrain.data.prompts import Task, read_prompts
from drafttrain.evaluation.config import AUTOREGRESSIVE
from drafttrain.evaluation.measure import MeasurementLog, autoregressive, drafting, measure
from drafttrain.evaluation.metrics import ratio, ratio_interval, tabulate
from drafttrain.kernels import linear
from drafttrain.kernels.build import sources_hash
from drafttrain.kernels.machine import describe_machine
from drafttrain.utils.provenance import content_hash, fingerprint, git_commit
from drafttrain.utils.writing import write_json
from studies.arguments import run, start
from studies.pipedec.tasks import TUNING

TREES = ("chain:length=4", "eagle2:top_k=3,max_depth=4,total=8", "eagle2:top_k=8,max_depth=5,total=24")
NEW_TOKENS = 48


def study(args: Namespace) -> None:
    """Measure both; write `measurements.jsonl` and `drafter_bytes.json`."""
    of_bytes = load_bundle(args.bundle, target=args.target, dtype="bfloat16", own_calibration=False)
    target = of_bytes.target
    with patch.object(linear, "to_bytes", lambda weight, panel: (weight.detach().contiguous(), None)):
        of_bf16 = load_bundle(args.bundle, target=target, own_calibration=False)
    methods = {AUTOREGRESSIVE: autoregressive(target)}
    for tree in TREES:
        methods |= {f"bytes {tree}": drafting(target, of_bytes.proposer(tree))}
        methods |= {f"bf16 {tree}": drafting(target, of_bf16.proposer(tree))}
    task = Task("tuning", read_prompts(TUNING, args.limit), 1)
    machine = describe_machine(target.device, target.dtype)
    same = [target.fingerprint, content_hash(args.bundle), TREES, NEW_TOKENS]
    key = fingerprint([*same, git_commit(), sources_hash(), machine])
    measured = measure(
        target, methods, task, MeasurementLog(args.out / "measurements.jsonl", key), NEW_TOKENS
    )
    rows = tabulate(measured)
    found = {
        tree: {
            "accept_len": {kind: rows[f"{kind} {tree}"].accept_len for kind in ("bf16", "bytes")},
            "speedup": {kind: rows[f"{kind} {tree}"].speedup for kind in ("bf16", "bytes")},
            "bytes_over_bf16": ratio(measured, f"bf16 {tree}", f"bytes {tree}"),
            "interval": ratio_interval(measured, f"bf16 {tree}", f"bytes {tree}"),
        }
        for tree in TREES
    }
    plain = rows[AUTOREGRESSIVE].tokens_per_second
    facts = {"plain": plain, "machine": machine, "commit": git_commit()}
    write_json(args.out / "drafter_bytes.json", {"trees": found, **facts})
    for tree, row in found.items():
        print(tree, row)


def main(argv: Sequence[str] | None = None) -> int:
    """Compare them; return the exit status."""
    return run(study, __doc__, argv, ("bundle", "target", "limit"), out="runs/drafter_bytes", limit=16)


if __name__ == "__main__":
    start(main)
