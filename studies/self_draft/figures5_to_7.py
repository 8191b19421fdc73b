"""Figures 5, 6 and 7 of the Self-Draft paper: number and length of branches, from 2 to 20.

python -m studies.self_draft.figures5_to_7 --limit 8
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from drafttrain.data.prompts import read_prompts, spread
from studies.arguments import start
from studies.self_draft.bench import FULL, Bench, run_study

SIZES = (2, 4, 6, 10, 20)  # numbers and lengths of branches


def branches(bench: Bench, args: Namespace) -> dict[str, Any]:
    """Measure accept_len, tokens per forward and tokens per second by number N and length L of branches, in
    the paper's setting."""
    prompts = spread(read_prompts(args.prompts), args.limit)
    found: dict[str, Any] = {}
    bench.decode(bench.proposer(FULL), prompts[:1], 16)  # the first forwards of a process are slow
    print("N   L   accept_len  verify_tokens  tokens/s")
    for number in SIZES:
        for length in SIZES:
            config = replace(
                FULL, branches=number, branch_length=length, gram=min(4, length), context=False, recycle=0
            )
            stats = bench.decode(bench.proposer(config), prompts, args.new_tokens)
            verified = stats.verify_tokens / max(stats.steps, 1)
            found[f"{number}x{length}"] = {
                "accept_len": stats.accept_len,
                "verify_tokens_per_step": verified,
                "tokens_per_second": stats.tokens_per_second,
            }
            row = f"{number:<3} {length:<3} {stats.accept_len:10.2f} {verified:14.1f}"
            print(f"{row} {stats.tokens_per_second:9.1f}", flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the figures; return the exit status."""
    return run_study(branches, __doc__, argv, ("prompts",))


if __name__ == "__main__":
    start(main)
