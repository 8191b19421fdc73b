"""The probe's measurements of this machine, kept in the user's cache."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafttrain.kernels.build import sources_hash, variant
from drafttrain.kernels.machine import describe_machine
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import cache_dir, read_json

Milliseconds = dict[str, dict[int, float]]  # candidate -> rows of the product -> milliseconds

FILE = "dtype.json"
FLOAT32, BFLOAT16 = "float32", "bfloat16"
TORCH = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16}
NATIVE = {f"native {name}": dtype for name, dtype in TORCH.items()}  # dtypes of the weights; sums are fp32
ROWS = (1, 16, 128)
JUDGED = {"decoding": (1, 16), "products": (128,)}  # rows by which a kind of work is judged


@dataclass(frozen=True)
class Timings:
    """The measurements of the probe.

    Attributes:
        ms: milliseconds of a product, by candidate and number of rows. A candidate that was hopeless at
            some number of rows has no entries for larger ones.
        disturbed: why the times are doubtful; None for good ones.
    """

    ms: Milliseconds
    disturbed: str | None = None


def timings_key(hidden: int, intermediate: int, threads: int) -> str:
    """Return a key of everything that the fastest dtype depends on."""
    parts = [
        describe_machine(torch.device("cpu"))["processor"],
        torch.backends.cpu.get_cpu_capability(),
        f"ONEDNN_MAX_CPU_ISA={os.environ.get('ONEDNN_MAX_CPU_ISA', '')}",
        f"torch {torch.__version__}",
        f"{threads} threads",
        f"{hidden}x{intermediate}",
        f"native kernels: {variant() or 'none'} {sources_hash()}",
    ]
    return ", ".join(map(str, parts))


def timings_file() -> Path:
    """Return the path of the file with all results of the probe."""
    return cache_dir() / FILE


def read_all() -> dict[str, Any]:
    """Return the stored results by key; none if the file is missing or damaged."""
    with contextlib.suppress(UserError):  # it is only a cache
        found = read_json(timings_file())
        if isinstance(found, dict):
            return found
    return {}


def read_timings(key: str) -> Timings | None:
    """Return the stored result of a key; None if there is none, or none that `probe.new_timings` wrote."""
    try:
        ms = {name: {int(n): float(t) for n, t in of.items()} for name, of in read_all()[key].items()}
        is_whole = ms.keys() in (TORCH.keys(), (TORCH | NATIVE).keys())
        is_whole &= set(ROWS) <= ms[FLOAT32].keys() and all(1 in of for of in ms.values())
        is_whole &= all({1, 16} <= ms[name].keys() for name in ms if name == "native float32")
        is_whole &= all(t > 0 for of in ms.values() for t in of.values())
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return Timings(ms) if is_whole else None
