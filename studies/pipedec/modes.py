"""PP, STPP and PipeDec on the same ranks, prompt by prompt in turn (PipeDec, Figure 5).

    python -m studies.pipedec.modes --recipe recipes/pipeline/smollm2-2.yaml --limit 8
    python -m studies.pipedec.modes --recipe recipes/pipeline/smollm2-2.yaml --limit 4 --set stages.ranks=14 \
        --set drafter_rank=alone --set pace.stage_ms=40 --set pace.draft_ms=10

Every rank is a process with its own cores, or with `pace` a device that is held for declared times. Seconds
are those of decoding with the prompt; a timing of a mode is followed by one of the next mode, and the order
changes with each prompt and repeat.
"""

import os
import statistics
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from drafttrain.pipeline.config import PipelineConfig
from drafttrain.run.pipeline import end_with_parent, join, start
from drafttrain.run.recipe import load_settings
from drafttrain.utils.files import write_json
from studies import arguments

MODES = ("pp", "stpp", "pipedec")


def study(args: Namespace) -> None:
    words = [f"--{pair}" for pair in args.set]
    words += ["--limit", str(args.limit)] if args.limit else []
    config = load_settings(PipelineConfig, args.recipe, words)
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "studies.pipedec.modes", *sys.argv[1:]]
        if start(config.world_size, command):
            sys.exit(2)
        return
    end_with_parent()
    rank = int(os.environ["RANK"])
    with join(config, rank) as pipeline:
        rows = []
        for repeat in range(args.repeats):
            for number, (name, request) in enumerate(pipeline.prompts):
                for turn in range(len(MODES)):
                    mode = MODES[(turn + number + repeat) % len(MODES)]
                    began = time.perf_counter()
                    output = pipeline.decode(mode, request)
                    seconds = time.perf_counter() - began
                    row = {"prompt": name, "repeat": repeat, "mode": mode, **vars(output)}
                    rows.append({**row, "seconds": seconds})
            if rank == 0:
                write_json(args.out / "modes.json", {"machine": pipeline.machine(), "rows": rows})
        late = pipeline.late()
    if rank == 0:
        show(rows, late)


def show(rows: Sequence[dict[str, Any]], late: float) -> None:
    """Print tokens per second of each mode over those of PP, medians over prompts of medians over repeats."""
    names = sorted({row["prompt"] for row in rows})

    def rate(name: str, mode: str) -> float:
        chosen = [row for row in rows if (row["prompt"], row["mode"]) == (name, mode)]
        return statistics.median(len(row["tokens"]) / row["seconds"] for row in chosen)

    for mode in MODES[1:]:
        ratios = [rate(name, mode) / rate(name, "pp") for name in names]
        print(f"{mode}: {statistics.median(ratios):.3f} times the tokens/s of pp ({len(names)} prompts)")
    texts = {(row["prompt"], tuple(row["tokens"])) for row in rows}
    print(f"texts are {'the same' if len(texts) == len(names) else 'different'} in all modes; ", end="")
    print(f"{late:.2%} of the paced pieces of work were late")


def main(argv: Sequence[str] | None = None) -> int:
    names = ("recipe", "limit", "repeats", "set")
    return arguments.run(study, __doc__, argv, names, "runs/pipedec")


if __name__ == "__main__":
    arguments.start(main)
