"""Figure 5 of the EDD paper: EDD that reads other blocks of the target, trained on answers to GSM8K.

python -m studies.edd.figure5
"""

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from drafttrain.data.config import Source
from drafttrain.utils.writing import write_text
from studies.arguments import start
from studies.edd.bench import (
    DRAFTER,
    TRAINING,
    Bench,
    answers,
    best_rate,
    run_study,
    summarize,
)

MATH = "gsm8k"  # how ids of answers to GSM8K's training questions begin
BLOCKS = (8, 18, 26, 29)  # of 30; 26 is the fourth-to-last


def figure5(bench: Bench) -> dict[str, Any]:
    """Train EDD on other blocks' outputs."""
    math = bench.out / "gsm8k_answers.jsonl"
    if not math.exists():
        write_math(Path(bench.responses), math)
    made_from, rows = bench.states("math", [Source(str(math))], list(BLOCKS)), {}
    rate = best_rate(bench, "edd", answers(bench))[0]
    for block in BLOCKS:
        drafter = replace(DRAFTER, tapped_blocks=[block], draft_vocab_size=4096)
        name = f"edd-block{block}-seed0"
        training = replace(TRAINING, lr=rate, seed=0, warmup_steps=20)
        rows[f"block {block}"] = [bench.trained(name, drafter, training, made_from)]
    return {"rows": summarize(rows)}


def write_math(responses: Path, out: Path) -> None:
    """Write the answers to GSM8K's training questions."""
    with gzip.open(responses, "rt", encoding="utf-8") as lines:
        kept = [line for line in lines if json.loads(line)["id"].startswith(MATH)]
    write_text(out, "".join(kept))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the study; return the exit status."""
    return run_study(figure5, __doc__, argv)


if __name__ == "__main__":
    start(main)
