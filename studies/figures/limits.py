"""Measure bytes read and multiply-adds per second at a machine's best, and the share of them in use."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch.utils.flop_counter import FlopCounterMode

from drafttrain.inference.acceptance import accept_greedy
from drafttrain.kernels.build import BF16_PRODUCTS, variant
from drafttrain.kernels.linear import NativeLinear, is_available
from drafttrain.kernels.team import native_team
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.tree import TokenTree

READ_BYTES = 512 << 20  # of the buffer that is read: no cache holds it
SIDES = (512, 1024, 2048)  # of the matrices that are multiplied
REPEATS = 7  # of the limits, of which the best counts
CONTEXT = 100  # tokens before those that are forwarded
FORWARDS = 40  # timed, of which the median counts


def fastest(run: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the least seconds of some calls, after one that does not count."""
    seconds = []
    run()
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


@torch.inference_mode()
def streaming_rate(size: int = READ_BYTES) -> dict[str, float]:
    """Measure bytes per second that all threads read, by torch's sum and by products of one row.

    The larger one is the machine's rate; the sum alone would let slow reading look like the limit.
    """
    numbers = torch.ones(size // 4)
    rates = {"sum": size / fastest(numbers.sum)}
    if is_available():
        inputs = 2048
        weight = torch.ones(size // (2 * inputs), inputs, dtype=torch.bfloat16)  # [out, in]
        layer, row = NativeLinear(weight), torch.ones(1, inputs)  # [1, in]
        del weight
        with native_team():
            rates["product"] = size / fastest(lambda: layer(row))
    return rates


@torch.inference_mode()
def arithmetic_rate(dtype: torch.dtype, sides: tuple[int, ...] = SIDES) -> float:
    """Measure multiply-adds per second of torch's matrix products in a dtype, at the best of some sizes."""
    rates = []
    for side in sides:
        a, b = (torch.randn(side, side, dtype=dtype) for _ in range(2))  # [side, side]
        rates.append(side**3 / fastest(lambda a=a, b=b: a @ b))
    return max(rates)


def native_arithmetic() -> torch.dtype:
    """Return the dtype that the native forward multiplies in: bf16 where the processor has such products."""
    return torch.bfloat16 if variant() in BF16_PRODUCTS else torch.float32


def weights_read(target: FrozenTarget) -> int:
    """Count the weights of the linear layers that every forward reads: of all blocks, and of the head."""
    layers = [*target.base.modules(), target.read_head]
    return sum(m.in_features * m.out_features for m in layers if hasattr(m, "in_features"))


@torch.inference_mode()
def forward_seconds(
    target: FrozenTarget, n: int, context: int = CONTEXT, repeats: int = FORWARDS
) -> list[float]:
    """Time forwards over a chain of n tokens after a context, head and choice of the next tokens included."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.vocab_size, (1, context), generator=generator)  # [1, c]
    cache, order = target.new_cache(1, context + n), torch.arange(context)  # [c]
    seconds = []
    with target.own_cores():
        target.forward(cache, ids, order, torch.ones(context, context, dtype=torch.bool).tril())
        cache.commit(order[None], torch.tensor([context]))
        tree = TokenTree.root_only(ids[:, -1])
        for i in range(1, n):
            last = torch.tensor([[i - 1]])  # [1, 1]
            tree = tree.append(last, ids[:, i : i + 1], torch.zeros(1, 1))
        for _ in range(repeats + 1):
            started = time.perf_counter()
            states = target.forward(cache, tree.tokens, tree.depths, tree.ancestors())
            accept_greedy(tree, target.head(states.final)).next_token.tolist()
            seconds.append(time.perf_counter() - started)
    return seconds[1:]


def limit_shares(
    weights: int, bytes_per_second: float, products_per_second: float, seconds: dict[int, list[float]]
) -> dict[int, dict[str, float]]:
    """Compare forwards with the least time that reading bf16 weights and multiplying by them takes.

    Args:
        weights: read by a forward.
        seconds: of forwards, by their tokens.

    Returns:
        by tokens: `share`, that least time / the median of the forwards, with both times in ms.
    """
    shares = {}
    for n, times in seconds.items():
        least = max(2 * weights / bytes_per_second, n * weights / products_per_second)
        taken = statistics.median(times)
        shares[n] = {"share": least / taken, "limit_ms": 1e3 * least, "forward_ms": 1e3 * taken}
    return shares


@torch.inference_mode()
def interleaved_shares(
    target: FrozenTarget, weights: int, products_per_second: float, tokens: Sequence[int], rounds: int = 15
) -> dict[int, float]:
    """Measure the shares of `limit_shares` with reads and forwards interleaved: the median over short rounds.

    On a virtual machine the rate of reading was seen to change by a factor of 2 within seconds.
    """
    numbers = torch.ones(READ_BYTES // 4)
    shares: dict[int, list[float]] = {n: [] for n in tokens}
    for _ in range(rounds):
        for n, found in shares.items():
            rate = READ_BYTES / fastest(numbers.sum, 2)
            seconds = {n: forward_seconds(target, n, repeats=7)}
            found.append(limit_shares(weights, rate, products_per_second, seconds)[n]["share"])
    return {n: statistics.median(found) for n, found in shares.items()}


def operations(run: Callable[[], object]) -> int:
    """Count the floating-point operations of torch's matrix products in a call, backward passes included."""
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()
