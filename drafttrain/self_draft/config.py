"""Settings of the n-gram cache and of Self-Draft's calibration."""

from dataclasses import dataclass, field
from typing import Literal

from drafttrain.data.config import PromptSet, Source
from drafttrain.utils.errors import UserError

LARGEST_GRAM = 16  # beyond any use; a slip of the keyboard should not count for hours
BRANCHES = ((0, 6), (1, 4), (2, 5), (6, 6))  # N and L that are tried, the paper's last
STRICTNESS = (0.5, 0.8, 1.2, 1.8)  # times the rate reached, tried as the rate to beat


@dataclass
class NgramConfig:
    """What a corpus cache is made from.

    Attributes:
        sources: read in this order; chats give their assistant turns. Equal texts are counted once.
        exclude: files of evaluation prompts; texts that contain one are left out.
        gram: tokens of the longest n-gram.
        min_count: rarer n-grams are dropped.
        top: candidates that a look-up returns at most.
        held_out: share of the texts that is left out, to measure how often the cache is right.
        processes: of encoding and counting; do not change the result.
        memory: GB that counting may take, all processes together.
    """

    sources: list[Source] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)
    gram: int = 5
    min_count: int = 2
    top: int = 16
    held_out: float = 0.02
    processes: int = 2
    memory: float = 1.0

    def check(self) -> None:
        """Raises:
        UserError: no source, or a value out of range.
        """
        if not self.sources:
            raise UserError("SOURCE: must name at least one file, folder or archive of text, got none")
        for name, low in (("gram", 2), ("min_count", 1), ("top", 1), ("processes", 1)):
            if getattr(self, name) < low:
                raise UserError(f"--{name.replace('_', '-')}: must be >= {low}, got {getattr(self, name)}")
        if self.gram > LARGEST_GRAM:
            raise UserError(f"--gram: must be <= {LARGEST_GRAM}, got {self.gram}")
        if not 0 <= self.held_out < 1:
            raise UserError(f"--held-out: must be >= 0 and < 1, got {self.held_out}")
        if not self.memory > 0:
            raise UserError(f"--memory: must be > 0 GB, got {self.memory}")


@dataclass
class TuneConfig:
    """How Self-Draft is tuned.

    Attributes:
        prompts: that no benchmark uses.
        max_new_tokens: tokens decoded per prompt at most.
        branches: N and L that are tried.
        strictness: rates that are tried, in terms of the rate reached.
        busy: what to do when other processes would spoil the timings.
    """

    prompts: PromptSet
    max_new_tokens: int = 96
    branches: tuple[tuple[int, int], ...] = BRANCHES
    strictness: tuple[float, ...] = STRICTNESS
    busy: Literal["warn", "refuse"] = "warn"
