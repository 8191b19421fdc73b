"""From raw measurements to the numbers that are reported.

A measurement is one chat turn decoded by every method, one after the other. Speed is tokens per second: new
tokens over seconds, both summed over turns; the seconds of a turn are the median over its repeats. A speedup
is a ratio of two speeds, never of total times: texts differ in length, by near-ties and by sampling, and a
method that stops earlier is no faster. Tokens and counts come from the first repeat, because greedy decoding,
and sampling with the same seed, gives the same in each. `inference/stats.py` defines accept_len and what is
counted with it.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from drafttrain.evaluation.config import AUTOREGRESSIVE, TRANSFORMERS
from drafttrain.inference.stats import DecodeStats
from drafttrain.utils.quantiles import quartiles
from drafttrain.utils.types import check_types

NOISY = 0.15  # interquartile range of the repeats' speedups / speedup, above which a row is flagged
CONTENDED = 0.1  # cores taken by other processes above which a row is flagged
BASELINES = (AUTOREGRESSIVE, TRANSFORMERS)
FIRST_RANGE = 256  # tokens of context; the ranges above it double


@dataclass
class MethodRun:
    """One method on one chat turn.

    Attributes:
        seconds: wall time, prompt included.
        token_ids: the emitted tokens.
        stats: counts and times of our own loop; None for other engines.
        peak_bytes: most memory in use during the run, as `memory.py` defines it; None if unknown.
    """

    seconds: float
    token_ids: list[int]
    stats: DecodeStats | None = None
    peak_bytes: int | None = None


@dataclass
class Measurement:
    """One chat turn decoded by every method, in the order of `runs`.

    Attributes:
        task: name of the prompt set.
        prompt: id of the prompt in it.
        turn: from 0.
        repeat: from 0.
        prompt_tokens: tokens of the chat so far.
        runs: by method.
        cpu_contention: cores that other processes took from us meanwhile; None if the system does not show
            them.
        temperature: of the texts; 0 is greedy.
        harness_seconds: time since the previous turn was measured, without the runs and their warm-up.
    """

    task: str
    prompt: str
    turn: int
    repeat: int
    prompt_tokens: int
    runs: dict[str, MethodRun]
    cpu_contention: float | None = None
    temperature: float = 0.0
    harness_seconds: float | None = None

    @property
    def key(self) -> tuple:
        """Return the key that identifies the measurement in a log."""
        place = (self.task, self.prompt, self.turn, self.repeat)
        return *place, frozenset(self.runs), self.temperature

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Measurement":
        """Rebuild what `to_json` returned.

        Raises:
            KeyError, TypeError, AttributeError: it is something else, or a value has another type.
        """
        runs = {
            method: MethodRun(**{**run, "stats": DecodeStats(**run["stats"]) if run["stats"] else None})
            for method, run in value["runs"].items()
        }
        measurement = cls(**{**value, "runs": runs})
        check_types(measurement)
        return measurement

    def to_json(self) -> dict[str, Any]:
        """Return the measurement as JSON can hold it."""
        return asdict(self)


@dataclass
class Row:
    """The reported numbers of one method over some measurements; None where one does not apply.

    Attributes:
        prompts: chat turns decoded.
        repeats: how often each was decoded.
        prompt_tokens, new_tokens: tokens of one repeat.
        seconds: sum over turns of the median over repeats.
        tokens_per_second: new tokens per second, prompt encoding included.
        speedup: tokens per second divided by those of our own autoregressive decoding.
        speedup_interval: 95 % confidence interval of it over prompts.
        speedup_transformers, speedup_transformers_interval: the same against `generate` of transformers.
        speedup_repeats: quartiles of the speedups of single repeats: the noise of the measurement.
        spread: distance of the outer two, divided by the speedup.
        speedup_turns: quartiles of the speedups of single turns: how much it depends on the prompt.
        identical: share of outputs that equal the autoregressive ones in the dtype that was timed (in bf16
            rounding decides near-ties by the shape of a forward); None for other engines that sample, which
            have their own random numbers.
        accept_len: tokens per target forward, the target's own included.
        accept_len_interval: 95 % confidence interval of it over prompts.
        accept_len_nonrepeated: the same over tokens outside repeated 4-grams; None if there are none.
        repetition: share of tokens in repeated 4-grams.
        accept_rate: accept_len per layer of tree.
        steps: target forwards after the prompt's.
        verify_tokens: draft tokens sent to the target; verify_per_step: the same per step.
        acceptance_by_depth: of the steps in which drafts at depth 1, 2, … were judged, the share in which one
            was accepted.
        time_split: shares of time in prefill, drafting, the target's modules, and everything else.
        outside_share: share of the steps' time outside forwards of target and drafter.
        peak_bytes: most memory in use during any of its runs.
        flags: reasons to distrust the row.
    """

    prompts: int
    repeats: int
    prompt_tokens: int
    new_tokens: int
    seconds: float
    tokens_per_second: float
    speedup: float | None = None
    speedup_interval: list[float] | None = None
    speedup_transformers: float | None = None
    speedup_transformers_interval: list[float] | None = None
    speedup_repeats: list[float] | None = None
    spread: float | None = None
    speedup_turns: list[float] | None = None
    identical: float | None = None
    accept_len: float | None = None
    accept_len_interval: list[float] | None = None
    accept_len_nonrepeated: float | None = None
    repetition: float | None = None
    accept_rate: float | None = None
    steps: int | None = None
    verify_tokens: int | None = None
    verify_per_step: float | None = None
    acceptance_by_depth: list[float] | None = None
    time_split: dict[str, float] | None = None
    outside_share: float | None = None
    peak_bytes: int | None = None
    flags: list[str] = field(default_factory=list)


COUNTED = (  # what a row copies from the statistics of our own loop
    "accept_len",
    "accept_len_nonrepeated",
    "repetition",
    "accept_rate",
    "steps",
    "verify_tokens",
    "verify_per_step",
    "acceptance_by_depth",
)


def tabulate(measurements: Sequence[Measurement]) -> dict[str, Row]:
    """Return a row for every method; all measurements have the same methods, and every turn the same
    repeats."""
    times = {method: _times(measurements, method) for method in measurements[0].runs}
    first = _first(measurements)
    return {method: _row(method, measurements, first, times) for method in times}


def ratio(measurements: Sequence[Measurement], base: str, method: str) -> float:
    """Return tokens per second of a method divided by those of another."""
    first = _first(measurements)
    speed, base_speed = (
        _new_tokens(name, first) / _total(_times(measurements, name)) for name in (method, base)
    )
    return speed / base_speed


def ratio_spread(measurements: Sequence[Measurement], base: str, method: str) -> list[float]:
    """Return the quartiles over repeats of the ratio within a single repeat."""
    first = _first(measurements)
    work = _new_tokens(method, first) / _new_tokens(base, first)
    times = [zip(*_times(measurements, name)) for name in (base, method)]
    return quartiles([work * sum(b) / sum(m) for b, m in zip(*times)])


def ratio_interval(measurements: Sequence[Measurement], base: str, method: str) -> list[float] | None:
    """Return the 95 % confidence interval of `ratio` over prompts, each turn with its tokens and its median
    seconds. None: a single prompt has no interval."""
    first, columns = _first(measurements), []
    for name in (method, base):
        columns.append([_new_tokens(name, [m]) for m in first])
        columns.append([statistics.median(times) for times in _times(measurements, name)])
    sums = _resampled(first, columns)
    if sums is None:
        return None
    tokens, seconds, base_tokens, base_seconds = sums
    return _interval((tokens / seconds) / (base_tokens / base_seconds))


def accept_len_interval(measurements: Sequence[Measurement], method: str) -> list[float] | None:
    """Return the 95 % confidence interval of accept_len over prompts: in each resample tokens and steps are
    summed before they are divided, as in accept_len itself. None: a single prompt has no interval.

    Args:
        method: one of our own loop, with statistics.
    """
    first = _first(measurements)
    counts = [m.runs[method].stats for m in first]
    sums = _resampled(
        first, [[one.new_tokens - one.prompts for one in counts], [one.steps for one in counts]]
    )
    if sums is None:
        return None
    tokens, steps = sums
    return _interval(tokens / np.maximum(steps, 1))  # outputs of one token take no steps


def cpu_contention(measurements: Sequence[Measurement]) -> float | None:
    """Return the mean over measurements of the cores that other processes took; None if none is known."""
    known = [m.cpu_contention for m in measurements if m.cpu_contention is not None]
    return statistics.fmean(known) if known else None


def context_range(tokens: int) -> str:
    """Return the range of context lengths that a number of tokens belongs to, such as 256-511."""
    if tokens < FIRST_RANGE:
        return f"0-{FIRST_RANGE - 1}"
    low = 1 << (tokens.bit_length() - 1)
    return f"{low}-{2 * low - 1}"


def by_context(measurements: Sequence[Measurement]) -> dict[str, list[Measurement]]:
    """Group measurements by range of context lengths, the shortest first."""
    parts: dict[str, list[Measurement]] = {}
    lengths = sorted({m.prompt_tokens for m in measurements})
    for name in dict.fromkeys(map(context_range, lengths)):
        parts[name] = [m for m in measurements if context_range(m.prompt_tokens) == name]
    return parts


def _resampled(first: Sequence[Measurement], columns: Sequence[Sequence[float]]) -> np.ndarray | None:
    """Return sums over the prompts of each of 1,000 bootstrap resamples (fixed seed), [columns, 1000]. A
    prompt is drawn with all its turns. None: there is a single prompt.

    Args:
        first: measurements of the first repeat.
        columns: numbers to sum, each with one per measurement.
    """
    numbers: dict[tuple[str, str], int] = {}
    rows = [numbers.setdefault((m.task, m.prompt), len(numbers)) for m in first]  # prompt of each turn
    if len(numbers) < 2:
        return None
    draws = np.random.default_rng(0).integers(len(numbers), size=(1000, len(numbers)))  # [1000, prompts]
    by_prompt = [np.bincount(rows, column) for column in columns]  # [prompts] each
    return np.stack([values[draws].sum(1) for values in by_prompt])


def _interval(values: np.ndarray) -> list[float]:
    """Return the 95 % percentile interval of a quantity's resamples."""
    return np.quantile(values, [0.025, 0.975]).tolist()


def _first(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Return the measurements of the first repeat."""
    return [measurement for measurement in measurements if measurement.repeat == 0]


def _times(measurements: Sequence[Measurement], method: str) -> list[list[float]]:
    """Return seconds by turn (in order of first appearance) and repeat."""
    by_turn: dict[tuple[str, str, int], list[float]] = {}
    for m in measurements:
        by_turn.setdefault((m.task, m.prompt, m.turn), []).append(m.runs[method].seconds)
    return list(by_turn.values())


def _total(times: list[list[float]]) -> float:
    return sum(statistics.median(repeats) for repeats in times)


def _new_tokens(method: str, measurements: Sequence[Measurement]) -> int:
    return sum(len(m.runs[method].token_ids) for m in measurements)


def _row(
    method: str,
    measurements: Sequence[Measurement],
    first: Sequence[Measurement],
    times: dict[str, list[list[float]]],
) -> Row:
    seconds, new_tokens = _total(times[method]), _new_tokens(method, first)
    row = Row(
        prompts=len(first),
        repeats=len(measurements) // len(first),
        prompt_tokens=sum(m.prompt_tokens for m in first),
        new_tokens=new_tokens,
        seconds=seconds,
        tokens_per_second=new_tokens / seconds,
    )
    peaks = [m.runs[method].peak_bytes for m in measurements]
    row.peak_bytes = max((peak for peak in peaks if peak is not None), default=None)
    if TRANSFORMERS in times:
        row.speedup_transformers = ratio(measurements, TRANSFORMERS, method)
        row.speedup_transformers_interval = ratio_interval(measurements, TRANSFORMERS, method)
    if AUTOREGRESSIVE in times:
        row.speedup = ratio(measurements, AUTOREGRESSIVE, method)
        row.speedup_interval = ratio_interval(measurements, AUTOREGRESSIVE, method)
        row.speedup_repeats = ratio_spread(measurements, AUTOREGRESSIVE, method)
        row.spread = (row.speedup_repeats[2] - row.speedup_repeats[0]) / row.speedup
        speeds = {
            name: [_new_tokens(name, [m]) / _total([t]) for m, t in zip(first, times[name])]
            for name in (method, AUTOREGRESSIVE)
        }
        row.speedup_turns = quartiles([a / b for a, b in zip(speeds[method], speeds[AUTOREGRESSIVE])])
        if first[0].runs[method].stats is not None or not first[0].temperature:
            same = [m.runs[method].token_ids == m.runs[AUTOREGRESSIVE].token_ids for m in first]
            row.identical = statistics.fmean(same)
    if first[0].runs[method].stats is not None:
        counts = sum((m.runs[method].stats for m in first), DecodeStats())
        for name in COUNTED:
            setattr(row, name, getattr(counts, name))
        row.accept_len_interval = accept_len_interval(measurements, method)
        timed = sum((m.runs[method].stats for m in measurements), DecodeStats())
        parts = ("prefill", "draft", "verify", "other")
        row.time_split = {part: getattr(timed, f"{part}_seconds") / timed.seconds for part in parts}
        row.outside_share = timed.outside_share
    row.flags = _flags(method, row, measurements)
    return row


def noise(repeats: Sequence[float], value: float) -> list[str]:
    """Return a flag if the ratios of single repeats differ too much.

    Args:
        repeats: quartiles of these ratios.
        value: ratio over all repeats.
    """
    low, _, high = repeats
    is_noisy = (high - low) / value > NOISY
    return [f"noisy: half of the repeats are outside {low:.2f} to {high:.2f}"] if is_noisy else []


def _flags(method: str, row: Row, measurements: Sequence[Measurement]) -> list[str]:
    flags = []
    if row.speedup is not None and method not in BASELINES:
        if row.steps and row.speedup > row.accept_len:  # outputs of one token take no steps
            flags.append("speedup above accept_len: the baseline was slowed by something")
        if row.speedup < 1:
            flags.append("slower than autoregressive decoding")
        flags += noise(row.speedup_repeats, row.speedup)
    taken = cpu_contention(measurements)
    if taken is not None and taken > CONTENDED:
        flags.append(f"other processes took {taken:.1f} cores meanwhile")
    return flags
