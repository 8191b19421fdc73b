"""Measure how many of a drafter's drawn drafts the target accepts, on trees of thoughts for other problems.

    python scripts/training_problems.py --gsm8k train.jsonl.gz --oanc oanc_written_2.zip --number 8 --seed 7 \
        --out runs/problems
    python -m studies.seed.drafters --bundle model_cards/smollm2-135m-edd --problems runs/problems

Nothing is timed, so that it may run beside other work. α is the share of drafts that are accepted where their
parent was, as in the paper's Table 2.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from drafttrain.utils.writing import write_json
from studies import arguments
from studies.seed.comparison import of, total
from studies.seed.methods import TASK_FILES, collect, drawn, scheduled
from studies.seed.pairs import load_pair

METHOD = scheduled("SEED", drawn(1, 1, 1), "batched")
PROBLEMS = 4


def study(args: Namespace) -> None:
    files = {task: f"{args.problems}/{task}.jsonl" for task in TASK_FILES}
    name = Path(args.bundle).name
    raw = args.out / f"drafters_{name}.jsonl"
    problems = dict.fromkeys(files, args.limit or PROBLEMS)
    pair = load_pair("B", args.target, args.bundle)
    found = collect(pair, lambda task: [METHOD], problems, 1, raw, args.resume, files=files)
    rows = {}
    for task in files:
        part = total(of(found, METHOD.name, task))
        rows[task] = {
            "alpha": part.granted / part.offered,
            "accept_len": part.accept_len,
            "tokens": part.tokens,
        }
    write_json(raw.with_suffix(".json"), {"bundle": name, "tree": METHOD.tree, "tasks": rows})
    for task, row in rows.items():
        print(
            f"{name} {task}: α {row['alpha']:.3f}, accept_len {row['accept_len']:.2f}, {row['tokens']} tokens"
        )


def main(argv: Sequence[str] | None = None) -> int:
    names = ("bundle", "target", "problems", "limit", "resume")
    return arguments.run(study, __doc__, argv, names, "docs/results/raw/seed")


if __name__ == "__main__":
    arguments.start(main)
