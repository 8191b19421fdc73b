"""Time Muon's step for a matrix with products in bf16, as torch makes them, and in fp32.

    python -m studies.muon_ways
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python -m studies.muon_ways --repeats 1

The matrices are those of layers of SmolLM2-135M and of Qwen2.5-Coder-0.5B. Prints milliseconds, medians; the
ways take turns.
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Sequence

import torch

from drafttrain.kernels.build import variant
from drafttrain.kernels.machine import describe_machine
from drafttrain.training.optimizer import Fp32Muon
from drafttrain.utils.provenance import git_commit
from drafttrain.utils.writing import write_json
from studies import arguments

SHAPES = ((1536, 576), (576, 576), (4864, 896), (896, 896))
WAYS = {"bfloat16": torch.optim.Muon, "float32": Fp32Muon}


def study(args: Namespace) -> None:
    ms: dict[tuple[tuple[int, int], str], list[float]] = {}
    for shape in SHAPES:
        matrices = {name: torch.nn.Parameter(torch.zeros(shape)) for name in WAYS}
        optimizers = {
            name: way([matrices[name]], adjust_lr_fn="match_rms_adamw") for name, way in WAYS.items()
        }
        for repeat in range(args.repeats + 1):
            gradient = torch.randn(shape, generator=torch.Generator().manual_seed(repeat))
            for name, optimizer in optimizers.items():
                matrices[name].grad = gradient
                begun = time.perf_counter()
                optimizer.step()
                if repeat:  # the first one warms up
                    ms.setdefault((shape, name), []).append(1e3 * (time.perf_counter() - begun))
    for (shape, name), each in ms.items():
        print(f"{shape[0]} x {shape[1]}, {name}: {statistics.median(each):.1f} ms", flush=True)
    machine = {**describe_machine(torch.device("cpu"), torch.float32), "kernels": variant()}
    rows = [{"shape": shape, "way": name, "ms": each} for (shape, name), each in ms.items()]
    out = args.out / f"muon_ways_{variant()}.json"
    write_json(out, {"rows": rows, "machine": machine, "commit": git_commit()})


def main(argv: Sequence[str] | None = None) -> int:
    return arguments.run(study, __doc__, argv, ("repeats",), "docs/results/raw/machine", repeats=5)


if __name__ == "__main__":
    arguments.start(main)
