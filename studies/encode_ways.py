"""Encode documents by the target's own modules and by the native forward: what collecting states takes.

    python -m studies.encode_ways

Prints milliseconds per token, medians; the ways take turns.
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Sequence

import torch

from drafttrain.kernels.build import variant
from drafttrain.kernels.machine import describe_machine
from drafttrain.target_lm.loading import load_target
from drafttrain.utils.provenance import git_commit
from drafttrain.utils.writing import write_json
from studies import arguments

SHAPES = ((8, 128), (4, 256), (2, 512))  # documents and their tokens


def study(args: Namespace) -> None:
    ways = {
        name: load_target(args.target or "smollm2-135m-instruct", args.dtype) for name in ("own", "native")
    }
    ways["native"].pack()
    for target in ways.values():
        target.tap([-4])
    ms: dict[tuple[int, str], list[float]] = {}
    for rows, length in SHAPES:
        ids = torch.randint(5, 10_000, (rows, length), generator=torch.Generator().manual_seed(0))
        for repeat in range(args.repeats + 1):
            for name, target in ways.items():
                with target.own_cores():
                    begun = time.perf_counter()
                    target.encode(ids, torch.zeros_like(ids))
                    took = 1e3 * (time.perf_counter() - begun) / ids.numel()
                if repeat:  # the first one warms up
                    ms.setdefault((length, name), []).append(took)
    for (length, name), each in ms.items():
        print(f"{length} tokens, {name}: {statistics.median(each):.3f} ms a token", flush=True)
    target = ways["own"]
    machine = {**describe_machine(target.device, target.dtype), "kernels": variant()}
    found = [{"length": length, "way": name, "ms_per_token": each} for (length, name), each in ms.items()]
    out = args.out / f"encode_ways_{variant()}.json"
    write_json(out, {"rows": found, "machine": machine, "commit": git_commit()})


def main(argv: Sequence[str] | None = None) -> int:
    return arguments.run(study, __doc__, argv, ("target", "dtype", "repeats"), "docs/results/raw/machine")


if __name__ == "__main__":
    arguments.start(main)
