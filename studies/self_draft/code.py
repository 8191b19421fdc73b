"""Speed of Self-Draft on code, against plain decoding and prompt lookup.

python -m studies.self_draft.code --limit 8
python -m studies.self_draft.code --target MODEL --ngrams DIR --tasks mine=prompts.jsonl
"""

import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafttrain.evaluation.measure import MeasurementLog, drafting, measure
from drafttrain.evaluation.metrics import AUTOREGRESSIVE
from drafttrain.inference.proposer import NoProposer
from drafttrain.self_draft.prompt_lookup import PromptLookup
from studies.arguments import start, tasks
from studies.policies import table
from studies.self_draft.bench import Bench, run_study

CODE = {"HumanEval": ("data/eval/humaneval.jsonl.gz", 1), "MBPP": ("data/eval/mbpp.jsonl", 1)}  # file, turns


def code(bench: Bench, args: Namespace) -> dict[str, Any]:
    """Measure what ships, as it was tuned, against plain decoding and prompt lookup on code, interleaved."""
    target = bench.target
    methods = {
        AUTOREGRESSIVE: drafting(target, NoProposer()),
        "lookup": drafting(target, PromptLookup(10)),
        "ngram": drafting(target, bench.settings.proposer(target, bench.corpus)),
        "ngram, no corpus": drafting(target, bench.settings.proposer(target, None)),
    }
    found: dict[str, Any] = {}
    print(f"{'task':10} {'method':22} accept_len  tokens/s  speedup")
    for task in tasks(args, CODE):
        with tempfile.TemporaryDirectory() as folder:
            log = MeasurementLog(Path(folder) / "measurements.jsonl", "")
            rows = table(measure(target, methods, task, log, args.new_tokens))
        found[task.name] = rows
        for method, row in rows.items():
            speed = row["tokens_per_second"] / rows[AUTOREGRESSIVE]["tokens_per_second"]
            numbers = f"{row['accept_len']:10.2f} {row['tokens_per_second']:9.1f} {speed:8.2f}"
            print(f"{task.name:10} {method:22} {numbers}", flush=True)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Measure it; return the exit status."""
    return run_study(code, __doc__, argv, ("tasks",))


if __name__ == "__main__":
    start(main)
