"""Ratios of seconds per token over prompts, with intervals."""

import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

RESAMPLES = 2000
Name = tuple[str, str]  # task and prompt


def ratio(base: Mapping[Name, float], other: Mapping[Name, float]) -> dict[str, Any]:
    """Return how many times as fast as `base` another way is, the mean over tasks of the ratios of their
    summed seconds per token; 95 % of it over samples of the prompts of each task, and the tasks' own."""
    names: dict[str, list[Name]] = {}
    for name in base:
        names.setdefault(name[0], []).append(name)

    def of(chosen: Sequence[Name]) -> float:
        return sum(base[name] for name in chosen) / sum(other[name] for name in chosen)

    draws, values = random.Random(0), []
    for _ in range(RESAMPLES):
        values.append(statistics.fmean(of(draws.choices(own, k=len(own))) for own in names.values()))
    values.sort()
    return {
        "value": statistics.fmean(of(own) for own in names.values()),
        "interval": [values[int(RESAMPLES * 0.025)], values[int(RESAMPLES * 0.975)]],
        "tasks": {task: of(own) for task, own in names.items()},
    }
