"""Settings of Self-Draft's calibration."""

from dataclasses import dataclass
from typing import Literal

from drafttrain.data.config import PromptSet
from drafttrain.utils.ranges import check_ranges, setting

BRANCHES = ((0, 6), (1, 4), (2, 5), (6, 6))  # N and L that are tried, the paper's last
STRICTNESS = (0.8, 1.2, 1.8, 2.7)


@dataclass
class TuneConfig:
    """How Self-Draft is tuned.

    Attributes:
        prompts: prompts to decode; none of a benchmark.
        max_new_tokens: tokens decoded per prompt at most.
        branches: numbers and lengths of branches (N, L) that are tried.
        strictness: rates to beat that are tried, relative to the rate reached.
        busy: what to do when other processes would spoil the timings.
    """

    prompts: PromptSet
    max_new_tokens: int = setting(96, ge=2)
    branches: tuple[tuple[int, int], ...] = BRANCHES
    strictness: tuple[float, ...] = STRICTNESS
    busy: Literal["warn", "refuse"] = "warn"

    def check(self) -> None:
        """Validate the settings.

        Raises:
            UserError: a value out of range.
        """
        check_ranges(self)
