"""Where the time of decoding goes: shares of a step, the slowest functions and the slowest operators.

python -m studies.profile_decode --tree eagle2:top_k=3,max_depth=4,total=8
"""

import argparse
import cProfile
import os
import pstats
import sys
from collections.abc import Sequence

from torch.profiler import ProfilerActivity, profile

from drafttrain.bundle import load_bundle
from drafttrain.data.prompts import read_prompts
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import NoProposer
from drafttrain.utils.errors import UserError
from studies import ROOT


def main(argv: Sequence[str] | None = None) -> int:
    """Profile decoding of one prompt; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--bundle", default="model_cards/smollm2-135m-edd", metavar="DIR")
    parser.add_argument("--tree", metavar="POLICY", help="none for no drafts (default: the bundle's)")
    parser.add_argument("--calibration", metavar="DIR", help="default: the bundle's")
    parser.add_argument("--prompts", default="data/tuning_prompts.jsonl", metavar="FILE")
    parser.add_argument("--tokens", type=int, default=96, metavar="N")
    parser.add_argument("--rows", type=int, default=25, metavar="N", help="rows of each listing")
    args = parser.parse_args(argv)
    try:
        loaded = load_bundle(args.bundle, calibration=args.calibration)
        proposer = NoProposer() if args.tree == "none" else loaded.proposer(args.tree)
        ids = read_prompts(args.prompts, 1)[0].token_ids(loaded.target.tokenizer)
    except UserError as error:
        print(f"profile_decode.py: {error}", file=sys.stderr)
        return 2
    decode_all(loaded.target, proposer, [ids], 16)
    stats = decode_all(loaded.target, proposer, [ids], args.tokens)[1]
    parts = {
        "target": stats.verify_seconds,
        "drafter": stats.draft_model_seconds,
        "tree policy": stats.draft_seconds - stats.draft_model_seconds,
        "loop": stats.other_seconds,
    }
    print(f"{stats.tokens_per_second:.1f} tokens/s, accept_len {stats.accept_len:.2f}; ms per step:")
    print(", ".join(f"{name} {1000 * seconds / stats.steps:.2f}" for name, seconds in parts.items()))
    calls = cProfile.Profile()
    calls.runcall(decode_all, loaded.target, proposer, [ids], args.tokens)
    pstats.Stats(calls).sort_stats("tottime").print_stats(args.rows)
    with profile(activities=[ProfilerActivity.CPU]) as operators:
        decode_all(loaded.target, proposer, [ids], args.tokens)
    table = operators.key_averages().table(sort_by="self_cpu_time_total", row_limit=args.rows)
    print(table)
    return 0


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
