"""`dtype: auto`: the dtype in which this machine computes fastest, measured and not guessed.

Processors without bf16 arithmetic multiply bf16 matrices up to a hundred times as slowly as fp32 ones, others
twice as fast. Decoding reads every weight for a few tokens: there half the bytes can win without bf16
arithmetic, with native kernels that compute in fp32 what is stored in bf16. So products of the target's size
are timed once per machine, in well under a second, and the times are kept in the user's cache. A GPU is asked
what it supports.
"""

import math
import os
import sys
from dataclasses import dataclass
from typing import Literal

import torch

from drafttrain.kernels.machine import dtype_name
from drafttrain.kernels.timings import (
    BFLOAT16,
    FLOAT32,
    JUDGED,
    NATIVE,
    TORCH,
    Milliseconds,
    Timings,
    read_timings,
    timings_key,
)
from drafttrain.utils.errors import UserError

Work = Literal["decoding", "products"]

AUTO = "auto"
NAMES = (AUTO, "bfloat16", "float32", "float16")
# bf16 may be this many times as slow as fp32 at some numbers of rows, if others make up for it: single tokens
# are most of decoding, and all work other than products takes equally long.
WORST = 1.5
CALLED = {"decoding": "decoding", "products": "large batches"}
SLOW = 2  # an explicit dtype gets a warning if it is this many times as slow as the other one

_known: dict[str, Timings] = {}  # of this process
_reported: set[str] = set()


@dataclass(frozen=True)
class Choice:
    """The dtype to compute in.

    Attributes:
        dtype: the dtype.
        reason: one line for the user.
    """

    dtype: torch.dtype
    reason: str


def resolve_dtype(name: str, work: Work, device: torch.device, hidden: int, intermediate: int) -> torch.dtype:
    """Return the dtype that a name means on this device, and print once what "auto" means here.

    An explicit dtype is used as given, with a warning if it is much slower.

    Args:
        work: "decoding", forwards of a few tokens; or "products", those of many: training, collecting.
        hidden, intermediate: sizes of the target.

    Raises:
        UserError: no such dtype, or float16 on a CPU.
    """
    if name not in NAMES:
        raise UserError(f"dtype: must be one of {', '.join(NAMES)}, got {name}; leave it out for {AUTO}")
    if device.type == "cuda":
        if name != AUTO:
            return getattr(torch, name)
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        found = torch.bfloat16 if native else torch.float32
        has = "computes in bfloat16" if native else "has no bfloat16"
        _report(f"dtype: {dtype_name(found)} for {CALLED[work]} (the GPU {has})")
        return found
    if name == "float16":
        raise UserError(
            "dtype: must be bfloat16 or float32 on a CPU, got float16, which CPUs compute slowest; leave it "
            f"out for {AUTO}"
        )
    if name == AUTO:
        choice = choose(work, timed(hidden, intermediate).ms)
        _report(choice.reason)
        return choice.dtype
    if _is_first_process():
        timings = timed(hidden, intermediate)
        if timings.disturbed is None and (warning := slow_warning(name, work, timings.ms)):
            _report(warning)
    return getattr(torch, name)


def choose(work: Work, ms: Milliseconds) -> Choice:
    """Return the choice by measured times: bf16 if it is not slower in the geometric mean over the numbers of
    rows by which the work is judged, and not much slower at any of them."""
    float32, bfloat16 = _candidates(work, ms)
    ratios = [ms[bfloat16].get(n, math.inf) / ms[float32][n] for n in JUDGED[work]]
    wins = max(ratios) <= WORST and math.prod(ratios) <= 1
    best, other = (BFLOAT16, FLOAT32) if wins else (FLOAT32, BFLOAT16)
    return Choice(TORCH[best], f"dtype: {best} for {CALLED[work]} ({_compared(work, ms, best, other)})")


def slow_warning(name: str, work: Work, ms: Milliseconds) -> str | None:
    """Return a warning in one line if a dtype is more than twice as slow as the other one, else None."""
    rows, other = _shared(work, ms), FLOAT32 if name == BFLOAT16 else BFLOAT16
    candidates = dict(zip((FLOAT32, BFLOAT16), _candidates(work, ms)))
    own, others = (sum(ms[candidates[one]][n] for n in rows) for one in (name, other))
    if own <= SLOW * others:
        return None
    return (
        f"dtype: {name} is {own / others:.1f} times as slow as {other} for {CALLED[work]} here "
        f"({_compared(work, ms, name, other)}); leave it out for {AUTO}"
    )


def timed(hidden: int, intermediate: int, threads: int | None = None) -> Timings:
    """Return the probe's result for this machine: from this process, the user's cache, or measured now."""
    threads = threads or torch.get_num_threads()
    key = timings_key(hidden, intermediate, threads)
    if key in _known:
        return _known[key]
    found, warning = read_timings(key), None
    if found is None:
        from drafttrain.kernels.probe import new_timings  # once for a machine

        found, warning = new_timings(key, hidden, intermediate, threads)
    if warning:
        _report(warning)
    return _known.setdefault(key, found)


def _candidates(work: Work, ms: Milliseconds) -> tuple[str, str]:
    """Return the fp32 and the bf16 candidate for this work: native kernels for decoding, if available."""
    float32, bfloat16 = NATIVE
    return (float32, bfloat16) if work == "decoding" and float32 in ms else (FLOAT32, BFLOAT16)


def _shared(work: Work, ms: Milliseconds) -> list[int]:
    """Return the numbers of rows to compare by: the work's, or the largest at which both were timed."""
    one, other = (ms[name].keys() for name in _candidates(work, ms))
    return [n for n in JUDGED[work] if n in one & other] or [max(one & other)]


def _compared(work: Work, ms: Milliseconds, one: str, other: str) -> str:
    """Return the times of two dtypes in words."""
    candidates = dict(zip((FLOAT32, BFLOAT16), _candidates(work, ms)))
    mine, theirs = ms[candidates[one]], ms[candidates[other]]
    parts = [
        f"{n} row{'' if n == 1 else 's'} {mine[n]:.3g} ms, {other} {theirs[n]:.3g} ms"
        for n in _shared(work, ms)
    ]
    return "; ".join(parts)


def _is_first_process() -> bool:
    return (os.environ.get("RANK") or "0") == "0"


def _report(line: str) -> None:
    """Print a line to stderr once, by the first of several processes."""
    if line not in _reported and _is_first_process():
        _reported.add(line)
        print(line, file=sys.stderr, flush=True)
