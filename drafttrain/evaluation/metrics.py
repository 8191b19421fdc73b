"""From raw measurements to the numbers that are reported.

A measurement is one chat turn decoded by every method, one after the other. Speed is tokens per second: new
tokens over seconds, both summed over turns, of each turn the median over repeats. A speedup is a ratio of two
speeds, never of total times: texts differ in length, by near-ties and by draws, and who stops earlier is no
faster. Tokens and counts come from the first repeat, because greedy decoding, and sampling with the same
seed, does the same in each. What accept_len and its kin mean is defined in `inference/stats.py`.
"""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from drafttrain.evaluation.config import AUTOREGRESSIVE, TRANSFORMERS
from drafttrain.inference.stats import DecodeStats
from drafttrain.utils.quantiles import quartiles

NOISY = 0.15  # interquartile range of the repeats' speedups / speedup, above which a row is flagged
CROWDED = 0.1  # cores taken by other processes above which a row is flagged


@dataclass
class MethodRun:
    """One method on one chat turn.

    Attributes:
        seconds: wall time, prompt included.
        token_ids: what it emitted.
        stats: counts and times of our own loop; None for other engines.
        peak_bytes: most memory in use meanwhile, as `memory.py` defines it; None where nobody looked.
    """

    seconds: float
    token_ids: list[int]
    stats: DecodeStats | None = None
    peak_bytes: int | None = None


@dataclass
class Measurement:
    """One chat turn decoded by every method, in the order of `runs`.

    Attributes:
        task: the prompt set.
        prompt: id of the prompt in it.
        turn: from 0.
        repeat: from 0.
        prompt_tokens: tokens of the chat so far.
        runs: by method.
        crowding: cores of which other processes deprived us meanwhile; None where the system does not tell.
        temperature: of the texts; 0 is greedy.
        harness_seconds: since the turn before was measured, without the runs themselves and their warm-up.
    """

    task: str
    prompt: str
    turn: int
    repeat: int
    prompt_tokens: int
    runs: dict[str, MethodRun]
    crowding: float | None = None
    temperature: float = 0.0
    harness_seconds: float | None = None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Measurement":
        runs = {
            method: MethodRun(**{**run, "stats": DecodeStats(**run["stats"]) if run["stats"] else None})
            for method, run in value["runs"].items()
        }
        return cls(**{**value, "runs": runs})

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Row:
    """What is reported about one method over some measurements; None where it does not apply.

    Attributes:
        prompts: chat turns decoded.
        repeats: how often each.
        prompt_tokens, new_tokens: tokens of one repeat.
        seconds: sum over turns of the median over repeats.
        tokens_per_second: new tokens per second, prompt encoding included.
        speedup: tokens per second divided by those of our own autoregressive decoding.
        speedup_interval: 95 % confidence interval of it over prompts.
        speedup_transformers: the same against `transformers` `generate`.
        speedup_transformers_interval: of that.
        speedup_repeats: quartiles of the speedups of single repeats: the noise of the measurement.
        spread: distance of the outer ones, divided by the speedup.
        speedup_turns: quartiles of the speedups of single turns: how much it depends on the prompt.
        identical: share of outputs that equal the autoregressive ones in the dtype that was timed (rounding
            decides near-ties by tree shape); None for other engines that sample, whose draws are their own.
        accept_len: tokens per target forward, the target's own included.
        accept_len_fresh: the same over tokens outside repeated 4-grams.
        repetition: share of tokens in repeated 4-grams.
        accept_rate: accept_len per layer of tree.
        steps: target forwards after the prompt's.
        verify_tokens: draft tokens sent to the target; verify_per_step: the same per step.
        acceptance_by_depth: share of judged drafts at depth 1, 2, … that were accepted.
        time_split: shares of time in prefill, drafting, the target's modules, and everything else.
        outside_share: share of the steps' time outside forwards of target and drafter.
        peak_bytes: most memory in use during any of its runs.
        flags: why the row should not be taken at its word.
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
    accept_len_fresh: float | None = None
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


def tabulate(measurements: Sequence[Measurement]) -> dict[str, Row]:
    """A row for every method; all measurements have the same methods, and every turn the same repeats."""
    times = {method: _times(measurements, method) for method in measurements[0].runs}
    first = _first(measurements)
    return {method: _row(method, measurements, first, times) for method in times}


def ratio(measurements: Sequence[Measurement], base: str, method: str) -> float:
    """Tokens per second of a method divided by those of another."""
    first = _first(measurements)
    speed, base_speed = (
        _new_tokens(name, first) / _total(_times(measurements, name)) for name in (method, base)
    )
    return speed / base_speed


def ratio_spread(measurements: Sequence[Measurement], base: str, method: str) -> list[float]:
    """Quartiles of the same ratio within each repeat."""
    first = _first(measurements)
    work = _new_tokens(method, first) / _new_tokens(base, first)
    times = [zip(*_times(measurements, name)) for name in (base, method)]
    return quartiles([work * sum(b) / sum(m) for b, m in zip(*times)])


def ratio_interval(measurements: Sequence[Measurement], base: str, method: str) -> list[float]:
    """95 % confidence interval of `ratio`: percentile bootstrap over prompts (1,000 resamples, fixed seed). A
    prompt is drawn with all its turns, each with its tokens and its median seconds."""
    first = _first(measurements)
    numbers: dict[tuple[str, str], int] = {}
    rows = [numbers.setdefault((m.task, m.prompt), len(numbers)) for m in first]  # prompt of each turn
    draws = np.random.default_rng(0).integers(len(numbers), size=(1000, len(numbers)))  # [1000, prompts]
    speeds = []
    for name in (method, base):
        tokens = np.bincount(rows, [_new_tokens(name, [m]) for m in first])  # [prompts]
        medians = [statistics.median(times) for times in _times(measurements, name)]
        seconds = np.bincount(rows, medians)  # [prompts]
        speeds.append(tokens[draws].sum(1) / seconds[draws].sum(1))  # [1000]
    return np.quantile(speeds[0] / speeds[1], [0.025, 0.975]).tolist()


def crowding(measurements: Sequence[Measurement]) -> float | None:
    """Mean over measurements of the cores that other processes took; None if the system does not tell."""
    known = [measurement.crowding for measurement in measurements if measurement.crowding is not None]
    return statistics.fmean(known) if known else None


def _first(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Those of the first repeat."""
    return [measurement for measurement in measurements if measurement.repeat == 0]


def _times(measurements: Sequence[Measurement], method: str) -> list[list[float]]:
    """Seconds by turn (in order of first appearance) and repeat."""
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
    seconds = _total(times[method])
    new_tokens = _new_tokens(method, first)
    row_is_ours = first[0].runs[method].stats is not None
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
        low, _, high = row.speedup_repeats
        row.spread = (high - low) / row.speedup
        speeds = {
            name: [_new_tokens(name, [m]) / _total([t]) for m, t in zip(first, times[name])]
            for name in (method, AUTOREGRESSIVE)
        }
        row.speedup_turns = quartiles([a / b for a, b in zip(speeds[method], speeds[AUTOREGRESSIVE])])
        if row_is_ours or not first[0].temperature:
            row.identical = statistics.fmean(
                m.runs[method].token_ids == m.runs[AUTOREGRESSIVE].token_ids for m in first
            )
    if row_is_ours:
        _add_decoding(
            row, [m.runs[method].stats for m in first], [m.runs[method].stats for m in measurements]
        )
    row.flags = _flags(method, row, measurements)
    return row


# what a row takes over from the statistics of our own loop
_COUNTED = (
    "accept_len",
    "accept_len_fresh",
    "repetition",
    "accept_rate",
    "steps",
    "verify_tokens",
    "acceptance_by_depth",
)


def _add_decoding(row: Row, first: list[DecodeStats], every: list[DecodeStats]) -> None:
    counts, times = sum(first, DecodeStats()), sum(every, DecodeStats())
    for name in _COUNTED:
        setattr(row, name, getattr(counts, name))
    row.verify_per_step = counts.verify_per_step
    parts = ("prefill", "draft", "verify", "other")
    row.outside_share = times.outside_share
    row.time_split = {part: getattr(times, f"{part}_seconds") / times.seconds for part in parts}


def _flags(method: str, row: Row, measurements: Sequence[Measurement]) -> list[str]:
    flags = []
    if row.speedup is not None and method not in (AUTOREGRESSIVE, TRANSFORMERS):
        if row.steps and row.speedup > row.accept_len:  # outputs of one token take no steps
            flags.append("speedup above accept_len: the baseline was slowed by something")
        if row.speedup < 1:
            flags.append("slower than autoregressive decoding")
        low, _, high = row.speedup_repeats
        if row.spread > NOISY:
            flags.append(f"noisy: half of the repeats lie outside {low:.2f} to {high:.2f}")
    busy = crowding(measurements)
    if busy is not None and busy > CROWDED:
        flags.append(f"other processes took {busy:.1f} cores meanwhile")
    return flags
