"""Several prompts at once: how fast, and whether each row says what it says alone."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from drafttrain.inference.acceptance import AcceptSampled, accept_greedy
from drafttrain.inference.decode import decode_all
from drafttrain.inference.proposer import Proposer
from drafttrain.inference.sampling import SamplingParams
from drafttrain.target.frozen import FrozenTarget


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


def in_batches(prompts: Sequence[Sequence[int]], size: int) -> Iterator[Sequence[Sequence[int]]]:
    """Neighbouring prompts, `size` at once; the last batch may be smaller."""
    for first in range(0, len(prompts), size):
        yield prompts[first : first + size]


def batch_times(
    target: FrozenTarget,
    proposers: dict[str, Proposer],
    prompts: Sequence[Sequence[int]],
    size: int,
    max_new_tokens: int,
    repeats: int,
) -> dict[str, BatchTimes]:
    """Times all prompts in batches with every proposer; proposers take turns batch by batch."""
    found = {name: BatchTimes() for name in proposers}
    for proposer in proposers.values():  # the first forwards of a process are slow
        decode_all(target, proposer, prompts[:size], 8)
    for _ in range(repeats):
        seconds, tokens, steps, after_prompt = ({name: 0.0 for name in proposers} for _ in range(4))
        for batch in in_batches(prompts, size):
            for name, proposer in proposers.items():
                started = time.perf_counter()
                outputs, stats = decode_all(target, proposer, batch, max_new_tokens)
                seconds[name] += time.perf_counter() - started
                tokens[name] += sum(map(len, outputs))
                steps[name] += stats.steps
                after_prompt[name] += stats.new_tokens - stats.prompts
        for name, times in found.items():
            times.rates.append(tokens[name] / seconds[name])
            times.accept_len = after_prompt[name] / max(steps[name], 1)
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
    """Decodes the prompts one by one and in batches of several sizes.

    Args:
        temperature: 0 for greedy decoding; each prompt draws with a seed of its own.

    Returns:
        for each proposer, the rows that came out differently: batch size and prompt number.
    """

    def run(proposer: Proposer, batch: Sequence[Sequence[int]], first: int) -> list[list[int]]:
        rule = accept_greedy
        if temperature:
            rule = AcceptSampled([SamplingParams(temperature, seed=first + row) for row in range(len(batch))])
        on_batch()
        return decode_all(target, proposer, batch, max_new_tokens, accept=rule)[0]

    differing: dict[str, list[dict[str, int]]] = {}
    for name, proposer in proposers.items():
        alone = [run(proposer, [prompt], i)[0] for i, prompt in enumerate(prompts)]
        differing[name] = []
        for size in sizes:
            together: list[list[int]] = []
            for batch in in_batches(prompts, size):
                together += run(proposer, batch, len(together))
            differing[name] += [
                {"batch": size, "prompt": i}
                for i, pair in enumerate(zip(alone, together))
                if pair[0] != pair[1]
            ]
    return differing
