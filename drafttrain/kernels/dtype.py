"""`dtype: auto`: the dtype in which this machine computes fastest, measured and not guessed.

Processors without bf16 arithmetic multiply bf16 matrices up to a hundred times as slowly as fp32 ones, others
twice as fast. Decoding reads every weight for a few tokens: there half the bytes can win without bf16
arithmetic, with native kernels that compute in fp32 what is stored in bf16. So products of the target's size
are timed once per machine, in well under a second, and the times are kept in the user's cache. A GPU is asked
what it supports.
"""

import contextlib
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

from drafttrain.kernels.build import variant
from drafttrain.kernels.linear import NativeLinear
from drafttrain.kernels.machine import describe_machine
from drafttrain.kernels.team import native_team
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import cache_dir, read_json, write_json
from drafttrain.utils.machine import BUSY, OtherLoad, dtype_name

Work = Literal["decoding", "products"]
Milliseconds = dict[str, dict[int, float]]  # candidate -> rows of the product -> milliseconds

AUTO = "auto"
NAMES = (AUTO, "bfloat16", "float32", "float16")
FILE = "dtype.json"

FLOAT32, BFLOAT16 = "float32", "bfloat16"
TORCH = {FLOAT32: torch.float32, BFLOAT16: torch.bfloat16}
NATIVE = {f"native {name}": dtype for name, dtype in TORCH.items()}  # dtypes of the weights; sums are fp32
ROWS = (1, 16, 128)
JUDGED = {"decoding": (1, 16), "products": (128,)}  # rows by which a kind of work is judged
# Times as slow as fp32 that bf16 may be at some of these rows, if others make up for it: single tokens are
# most of decoding, and what is done beside the products takes equally long.
WORST = 1.5
CALLED = {"decoding": "decoding", "products": "large batches"}

TURNS, MIN_TURNS, SECONDS = 9, 4, 0.08  # repeats of the products of each number of rows, and seconds for them
STREAMED = 64e6  # bytes of fp32 weights multiplied in turn: more than caches hold, as in a whole model
MAX_COPIES, MAX_WEIGHTS = 16, 1 << 22  # larger matrices are cut to this many weights: time grows with them
HOPELESS, SHORT = 3, 1e-3  # this many times as slow as fp32, where it takes more seconds than this
SLOW = 2  # times as slow as the fastest, and an explicit dtype gets a warning
SPREAD, LEAST_SPREAD = 0.5, 5e-5  # quartile range of undisturbed repeats: share of their median, seconds
LEAST_TAKEN = 0.03  # core-seconds; the system counts in hundredths
SPIN = 0.01  # seconds after an operator in which torch's threads may still hold the cores

_known: dict[str, "Timings"] = {}  # of this process
_reported: set[str] = set()


@dataclass(frozen=True)
class Timings:
    """The measurements of the probe.

    Attributes:
        ms: milliseconds of a product, by candidate and rows. A candidate that was hopeless has no
            entries for more rows.
        disturbed: why the times are doubtful; None for good ones.
    """

    ms: Milliseconds
    disturbed: str | None = None


@dataclass(frozen=True)
class Choice:
    """The dtype to compute in.

    Attributes:
        dtype: it.
        ms: the measured milliseconds of every candidate.
        reason: one line for the user.
    """

    dtype: torch.dtype
    ms: Milliseconds
    reason: str


def resolve_dtype(name: str, work: Work, device: torch.device, hidden: int, intermediate: int) -> torch.dtype:
    """Return the dtype that a name stands for on this device, and print once what "auto" means here.

    An explicit dtype is used as it is named; a much slower one gets a warning.

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
        choice = fastest_dtype(work, hidden, intermediate)
        _report(choice.reason)
        return choice.dtype
    if _is_first_process():
        timings = timed(hidden, intermediate)
        if timings.disturbed is None and (warning := slow_warning(name, work, timings.ms)):
            _report(warning)
    return getattr(torch, name)


def fastest_dtype(work: Work, hidden: int, intermediate: int, threads: int | None = None) -> Choice:
    """Return the dtype in which this machine's CPU does a kind of work fastest.

    Args:
        threads: None for those in use.
    """
    return choose(work, timed(hidden, intermediate, threads).ms)


def choose(work: Work, ms: Milliseconds) -> Choice:
    """Choose by measured times: bf16 where it is not slower, in the geometric mean over the rows by which the
    work is judged, and not much slower at any of them."""
    float32, bfloat16 = _candidates(work, ms)
    ratios = [ms[bfloat16].get(n, math.inf) / ms[float32][n] for n in JUDGED[work]]
    wins = max(ratios) <= WORST and math.prod(ratios) <= 1
    best, other = (BFLOAT16, FLOAT32) if wins else (FLOAT32, BFLOAT16)
    return Choice(TORCH[best], ms, f"dtype: {best} for {CALLED[work]} ({_compared(work, ms, best, other)})")


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
    """Return the probe's result for this machine: of this process, of the user's cache, or a new one.

    A probe that other processes disturbed is repeated once; if that one is disturbed as well, the times of
    one thread are used, with a warning, and not kept.
    """
    threads = threads or torch.get_num_threads()
    key = _key(hidden, intermediate, threads)
    if key not in _known:
        _known[key] = _read(key) or _new(key, hidden, intermediate, threads)
    return _known[key]


def measure(hidden: int, intermediate: int, threads: int) -> Timings:
    """Time products of 1, 16 and 128 rows with matrices of the target's size in every candidate dtype.

    The fastest of some repeats counts: others may have waited for a core. torch's candidates take turns, so
    that a load that comes and goes meets both. The native kernels have threads of their own, and are timed
    while torch's are idle, as in decoding.
    """
    in_use, spread = torch.get_num_threads(), False
    load, begun = OtherLoad(), time.perf_counter()
    if threads != in_use:
        torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            width = min(intermediate, max(1, MAX_WEIGHTS // hidden))
            products = _products(hidden, width)
            native = {name: products.pop(name) for name in NATIVE if name in products}
            ms: Milliseconds = {name: {} for name in [*products, *native]}
            for rows in ROWS:
                x = _random(rows, hidden)
                seconds = _take_turns(products, x)
                if rows in JUDGED["decoding"]:
                    with native_team():
                        time.sleep(SPIN if native else 0)
                        seconds |= _take_turns(native, x, seconds[FLOAT32])
                for name, found in seconds.items():
                    ms[name][rows] = 1e3 * min(found)
                    spread |= _is_spread(found)
                    if _is_hopeless(found, seconds[FLOAT32]):
                        products.pop(name, None)
                        native.pop(name, None)
    finally:
        if threads != in_use:
            torch.set_num_threads(in_use)
    taken = load.lap() or 0.0
    if taken > BUSY and taken * (time.perf_counter() - begun) > LEAST_TAKEN:
        return Timings(ms, f"other processes took {taken:.1f} of its {threads} cores")
    return Timings(ms, "its repeats differ too much" if spread else None)


def _products(hidden: int, width: int) -> dict[str, list[Callable[[torch.Tensor], torch.Tensor]]]:
    """Linear layers of each candidate, enough of them that no cache holds their weights."""
    copies = max(1, min(MAX_COPIES, round(STREAMED / (4 * hidden * width))))
    weights = [_random(width, hidden)]
    weights += [weights[0].clone() for _ in range(copies - 1)]
    narrow = [weight.bfloat16() for weight in weights]
    found = {torch.float32: weights, torch.bfloat16: narrow}
    products = {name: [partial(F.linear, weight=w) for w in found[dtype]] for name, dtype in TORCH.items()}
    if variant() is not None:
        products |= {name: [NativeLinear(w, None) for w in found[dtype]] for name, dtype in NATIVE.items()}
    return products


def _random(*shape: int) -> torch.Tensor:
    """Numbers that leave the random state of a training alone."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _take_turns(
    products: dict[str, list[Callable]], x: torch.Tensor, reference: list[float] | None = None
) -> dict[str, list[float]]:
    """Seconds of each candidate's products with an input [rows, H]; a hopeless candidate has three.

    Args:
        reference: seconds of fp32, where it is not among the candidates.
    """
    inputs = {name: x.to((TORCH | NATIVE)[name]) for name in products}
    seconds: dict[str, list[float]] = {name: [] for name in products}
    reference = seconds.get(FLOAT32, reference)
    for name, layers in products.items():
        layers[0](inputs[name])  # the first call sets things up
    begun = time.perf_counter()
    for turn in range(TURNS):
        if turn >= MIN_TURNS and time.perf_counter() - begun > SECONDS:
            break
        for name, layers in products.items():
            if len(seconds[name]) >= 3 and _is_hopeless(seconds[name], reference):
                continue
            started = time.perf_counter()
            layers[turn % len(layers)](inputs[name])
            seconds[name].append(time.perf_counter() - started)
    return seconds


def _is_hopeless(seconds: list[float], reference: list[float]) -> bool:
    return min(seconds) > max(SHORT, HOPELESS * min(reference))


def _is_spread(seconds: list[float]) -> bool:
    if len(seconds) < MIN_TURNS:
        return False
    low, middle, high = statistics.quantiles(seconds, n=4)
    return high - low > max(LEAST_SPREAD, SPREAD * middle)


def _new(key: str, hidden: int, intermediate: int, threads: int) -> Timings:
    found = measure(hidden, intermediate, threads)
    if found.disturbed is not None:
        found = measure(hidden, intermediate, threads)
    if found.disturbed is not None:
        # Several threads wait for the one that has no core; the times of one compare, if nothing else.
        found = Timings(measure(hidden, intermediate, threads=1).ms, found.disturbed)
        _report(
            f"dtype: the probe was disturbed ({found.disturbed}); it was repeated on one thread and not kept"
        )
    else:
        _write(key, found)
    return found


def _key(hidden: int, intermediate: int, threads: int) -> str:
    """Return a key of everything that the fastest dtype depends on."""
    parts = [
        describe_machine(torch.device("cpu"))["processor"],
        torch.backends.cpu.get_cpu_capability(),
        f"ONEDNN_MAX_CPU_ISA={os.environ.get('ONEDNN_MAX_CPU_ISA', '')}",
        f"torch {torch.__version__}",
        f"{threads} threads",
        f"{hidden}x{intermediate}",
        f"native kernels: {variant() or 'none'}",
    ]
    return ", ".join(map(str, parts))


def _cache() -> Path:
    return cache_dir() / FILE


def _read_all() -> dict[str, Any]:
    with contextlib.suppress(UserError):  # not there, or damaged: it is only a cache
        found = read_json(_cache())
        if isinstance(found, dict):
            return found
    return {}


def _read(key: str) -> Timings | None:
    """A kept result; None where there is none, or what is there was not written by `_write`."""
    try:
        ms = {name: {int(n): float(t) for n, t in of.items()} for name, of in _read_all()[key].items()}
        is_whole = ms.keys() in (TORCH.keys(), (TORCH | NATIVE).keys())
        is_whole &= set(ROWS) <= ms[FLOAT32].keys() and all(1 in of for of in ms.values())
        is_whole &= all({1, 16} <= ms[name].keys() for name in ms if name == "native float32")
        is_whole &= all(t > 0 for of in ms.values() for t in of.values())
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return Timings(ms) if is_whole else None


def _write(key: str, found: Timings) -> None:
    try:
        write_json(_cache(), {**_read_all(), key: found.ms})
    except OSError as error:
        _report(
            f"dtype: {_cache()} cannot be written ({error.strerror or error}): every start measures again; "
            "set DRAFTTRAIN_CACHE to a folder that can"
        )


def _candidates(work: Work, ms: Milliseconds) -> tuple[str, str]:
    """Return what does this work in fp32 and in bf16: for decoding the native kernels if available."""
    float32, bfloat16 = NATIVE
    return (float32, bfloat16) if work == "decoding" and float32 in ms else (FLOAT32, BFLOAT16)


def _shared(work: Work, ms: Milliseconds) -> list[int]:
    """Rows by which to compare the candidates: the work's, or the most at which a hopeless one was timed."""
    one, other = (ms[name].keys() for name in _candidates(work, ms))
    return [n for n in JUDGED[work] if n in one & other] or [max(one & other)]


def _compared(work: Work, ms: Milliseconds, one: str, other: str) -> str:
    """The times of two dtypes, in words."""
    candidates = dict(zip((FLOAT32, BFLOAT16), _candidates(work, ms)))
    mine, theirs = ms[candidates[one]], ms[candidates[other]]
    parts = [
        f"{n} row{'' if n == 1 else 's'} {mine[n]:.3g} ms, {other} {theirs[n]:.3g} ms"
        for n in _shared(work, ms)
    ]
    return "; ".join(parts)


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _report(line: str) -> None:
    """Print a line to stderr once, by the first of several processes."""
    if line not in _reported and _is_first_process():
        _reported.add(line)
        print(line, file=sys.stderr, flush=True)
