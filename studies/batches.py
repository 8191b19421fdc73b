"""Several prompts at once: how fast, and whether each row has the text that it has alone."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from drafttrain.inference.acceptance import accept_greedy
from drafttrain.inference.decode import decode_all
from drafttrain.inference.matching import AcceptMatching
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.proposer import Proposer
from drafttrain.target_lm.model import FrozenTarget


@dataclass
class BatchTimes:
    """All prompts decoded in batches.

    Attributes:
        rates: emitted tokens per second, of each repeat.
        accept_len: tokens per target forward and row.
    """

    rates: list[float] = field(default_factory=list)
    accept_len: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return statistics.median(self.rates)


def batch_times(
    target: FrozenTarget,
    proposers: dict[str, Proposer],
    prompts: Sequence[Sequence[int]],
    size: int,
    max_new_tokens: int,
    repeats: int,
) -> dict[str, BatchTimes]:
    """Time all prompts, `size` at a time, with every proposer; proposers take turns."""
    found = {name: BatchTimes() for name in proposers}
    for proposer in proposers.values():  # the first forwards of a process are slow
        decode_all(target, proposer, prompts[:size], 8)
    for _ in range(repeats):
        for name, proposer in proposers.items():
            started = time.perf_counter()
            outputs, stats = decode_all(target, proposer, prompts, max_new_tokens, max_rows=size)
            found[name].rates.append(sum(map(len, outputs)) / (time.perf_counter() - started))
            found[name].accept_len = stats.accept_len
    return found


def batch_mismatches(
    target: FrozenTarget,
    proposers: dict[str, Proposer],
    prompts: Sequence[Sequence[int]],
    sizes: Sequence[int],
    max_new_tokens: int,
    temperature: float = 0.0,
    on_batch: Callable[[], None] = lambda: None,
) -> dict[str, list[dict[str, int]]]:
    """Decode the prompts one by one and in batches of several sizes, refilled as outputs end.

    Args:
        temperature: 0 for greedy decoding; each prompt draws with a seed of its own.

    Returns:
        for each proposer, the rows that came out differently: batch size and prompt number.
    """

    def run(proposer: Proposer, numbers: Sequence[int], size: int) -> list[list[int]]:
        rule = accept_greedy
        if temperature:
            rule = AcceptMatching([SamplingParams(temperature, seed=number) for number in numbers])
        on_batch()
        chosen = [prompts[number] for number in numbers]
        return decode_all(target, proposer, chosen, max_new_tokens, accept=rule, max_rows=size)[0]

    differing: dict[str, list[dict[str, int]]] = {}
    for name, proposer in proposers.items():
        alone = [run(proposer, [i], 1)[0] for i in range(len(prompts))]
        differing[name] = []
        for size in sizes:
            together = run(proposer, range(len(prompts)), size)
            differing[name] += [
                {"batch": size, "prompt": i}
                for i, pair in enumerate(zip(alone, together))
                if pair[0] != pair[1]
            ]
    return differing
