#!/usr/bin/env python
"""Time torch's own ways to multiply a few rows by many matrices against the native kernel:

    python -m studies.linear_ways [--rows 1,5,8,16] [--out docs/results/linear_ways.json]

150 matrices of 576 x 1536 (the linear layers of SmolLM2-135M without its head), read one after the other: no
cache holds them. All ways are interleaved; printed are medians in ms. `compiled` is torch.compile with
freezing and max_autotune's C++ templates, one graph for each number of rows, over 50 matrices, three times.
`native bytes` is what drafters have in bf16.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from drafttrain.kernels.linear import NativeLinear, is_available
from drafttrain.kernels.machine import describe_machine
from drafttrain.kernels.team import native_team
from drafttrain.target_lm.cpu_linear import PackedLinear, can_pack
from drafttrain.utils.provenance import git_commit

MATRICES, COMPILED, REPEATS = 150, 50, 7
OUT, IN = 1536, 576
Way = Callable[[torch.Tensor], None]


def compiled(layers: list[nn.Linear]) -> Way:
    """Return a frozen graph of some layers, called until it has read as many matrices as the others."""
    import torch._inductor.config as settings

    settings.freezing, settings.max_autotune, settings.max_autotune_gemm_backends = True, True, "CPP,ATEN"
    torch._dynamo.config.recompile_limit = 64
    stack = nn.ModuleList(layers).eval()

    @torch.compile(dynamic=False)
    def run(x: torch.Tensor) -> list[torch.Tensor]:
        return [layer(x) for layer in stack]

    return lambda x: [run(x) for _ in range(MATRICES // COMPILED)] and None


def packed_fp32(weights: list[torch.Tensor]) -> Way:
    """Multiply as `PackedLinear` does, in fp32."""
    packed = [torch.ops.mkldnn._reorder_linear_weight(weight, 1) for weight in weights]
    product = torch.ops.mkldnn._linear_pointwise.default
    return lambda x: [product(x, weight, None, "none", [], "") for weight in packed] and None


def ways(with_compiled: bool) -> dict[str, tuple[torch.dtype, Way]]:
    """Return every way by name, with the dtype of its rows."""

    def each(layers: list[nn.Module]) -> Way:
        return lambda x: [layer(x) for layer in layers] and None

    found: dict[str, tuple[torch.dtype, Way]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        weights = [torch.randn(OUT, IN).to(dtype) / IN**0.5 for _ in range(MATRICES)]
        layers = [nn.Linear(IN, OUT, bias=False) for _ in weights]
        for layer, weight in zip(layers, weights):
            layer.weight = nn.Parameter(weight, requires_grad=False)
        found[f"torch {name}"] = dtype, each(layers)
        if can_pack(layers[0]):
            found[f"oneDNN packed {name}"] = dtype, each([PackedLinear(w, None) for w in weights])
        elif hasattr(torch.ops.mkldnn, "_linear_pointwise") and dtype == torch.float32:
            found[f"oneDNN packed {name}"] = dtype, packed_fp32(weights)
        if with_compiled:
            found[f"compiled {name}"] = dtype, compiled(layers[:COMPILED])
        if is_available():
            found[f"native {name}"] = torch.float32, each([NativeLinear(w) for w in weights])
            if dtype == torch.bfloat16:
                found["native bytes"] = torch.float32, each([NativeLinear(w, narrow=True) for w in weights])
    return found


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rows", default="1,5,8,16")
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    rows = [int(word) for word in args.rows.split(",")]
    every = ways(args.compiled)
    table: dict[str, dict[int, float]] = {name: {} for name in every}
    for n in rows:
        seconds: dict[str, list[float]] = {name: [] for name in every}
        for repeat in range(REPEATS + 1):  # the first one compiles
            for name, (dtype, way) in every.items():
                x = torch.randn(n, IN).to(dtype)
                team = native_team() if name.startswith("native") else torch.no_grad()
                with team:
                    time.sleep(0.02)  # torch's threads spin after an operator
                    started = time.perf_counter()
                    way(x)
                    if repeat:
                        seconds[name].append(time.perf_counter() - started)
        for name, values in seconds.items():
            table[name][n] = round(1e3 * statistics.median(values), 2)
    print("| way | " + " | ".join(f"{n} rows" for n in rows) + " |\n" + "|---" * (len(rows) + 1) + "|")
    for name, values in table.items():
        print(f"| {name} | " + " | ".join(f"{values[n]:.1f}" for n in rows) + " |")
    if args.out:
        machine = describe_machine(torch.device("cpu"))
        stamp = {"machine": machine, "commit": git_commit(), "measured": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        args.out.write_text(json.dumps({"ms": table, **stamp}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
