"""Time products of the target's size in every candidate dtype, in well under a second, once for a machine."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from drafttrain.kernels.build import variant
from drafttrain.kernels.linear import NativeLinear
from drafttrain.kernels.team import native_team
from drafttrain.kernels.timings import (
    FLOAT32,
    JUDGED,
    NATIVE,
    ROWS,
    TORCH,
    Milliseconds,
    Timings,
    read_all,
    timings_file,
)
from drafttrain.utils.machine import BUSY, OtherLoad
from drafttrain.utils.writing import write_json

TURNS, MIN_TURNS, SECONDS = 9, 4, 0.08  # repeats of the products of each number of rows, and seconds for them
STREAMED = 64e6  # bytes of fp32 weights multiplied in turn: more than caches hold, as in a whole model
MAX_COPIES, MAX_WEIGHTS = 16, 1 << 22  # larger matrices are cut to this many weights: time grows with them
HOPELESS, SHORT = 3, 1e-3  # this many times as slow as fp32, where it takes more seconds than this
SPREAD, LEAST_SPREAD = 0.5, 5e-5  # quartile range of undisturbed repeats: share of their median, seconds
LEAST_TAKEN = 0.03  # core-seconds; the system counts in hundredths
SPIN = 0.01  # seconds after an operator in which torch's threads may still hold the cores


def new_timings(key: str, hidden: int, intermediate: int, threads: int) -> tuple[Timings, str | None]:
    """Measure this machine and store the timings for later processes; return them and a warning for the user.

    A disturbed measurement is repeated once; if that is disturbed as well, the times of one thread are
    returned, and not stored.
    """
    found = measure(hidden, intermediate, threads)
    if found.disturbed is not None:
        found = measure(hidden, intermediate, threads)
    if found.disturbed is not None:
        # Several threads wait for the one that has no core; times of one thread can at least be compared.
        found = Timings(measure(hidden, intermediate, threads=1).ms, found.disturbed)
        warning = f"the probe was disturbed ({found.disturbed}); it was repeated on one thread and not kept"
        return found, f"dtype: {warning}"
    try:
        write_json(timings_file(), {**read_all(), key: found.ms})
    except OSError as error:
        return found, (
            f"dtype: {timings_file()} cannot be written ({error.strerror or error}): every start measures "
            "again; set DRAFTTRAIN_CACHE to a folder that can"
        )
    return found, None


def measure(hidden: int, intermediate: int, threads: int) -> Timings:
    """Time products of 1, 16 and 128 rows with matrices of the target's size in every candidate dtype.

    The fastest of some repeats counts: others may have waited for a core. torch's candidates take turns, so
    that a load that comes and goes affects both. The native kernels have their own threads, and are timed
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
                    if _is_hopeless(found, seconds[FLOAT32]) and name != f"native {FLOAT32}":
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
    """Return linear layers of each candidate, enough of them that no cache holds all their weights."""
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
    """Return random numbers without changing torch's global random state, which a training uses."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float)


def _take_turns(
    products: dict[str, list[Callable]], x: torch.Tensor, reference: list[float] | None = None
) -> dict[str, list[float]]:
    """Return the seconds of each candidate's products with an input [rows, H], three of a hopeless one.

    Args:
        reference: seconds of fp32, if it is not among the candidates.
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
