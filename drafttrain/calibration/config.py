"""Settings of the calibration stage."""

from dataclasses import dataclass, field
from typing import Literal

from drafttrain.data.config import PromptSet
from drafttrain.utils.errors import UserError

STRICTNESS = (1.0, 1.4, 2.0, 2.8)  # times the rate of an EAGLE-2 tree, tried as the rate to beat
BETAS = (0.05, 0.08, 0.12, 0.18, 0.26)  # tried as the only threshold of C2T
C2T_TRIALS = len(BETAS) + len(STRICTNESS)


@dataclass
class CalibrateConfig:
    """How a drafter is calibrated (section `calibrate` of a recipe).

    Attributes:
        prompts: prompts to decode; none of a benchmark.
        quick: measure for some seconds on built-in prompts, as decoding does where it needs costs.
        max_new_tokens: tokens decoded per prompt at most.
        rounds: measurements of each size.
        width: children of an expanded node in trees.
        chain_length: of the drafts whose confidence is judged.
        busy: what to do when other processes would spoil the timings.
    """

    prompts: PromptSet | None = None
    quick: bool = False
    max_new_tokens: int = 96
    rounds: int = 15
    width: int = 4
    chain_length: int = 10
    busy: Literal["warn", "refuse"] = field(default="warn", metadata={"changes_output": False})

    @property
    def is_asked(self) -> bool:
        """Whether anything is to be calibrated."""
        return self.quick or self.prompts is not None

    def check(self) -> None:
        """Raises:
        UserError: a value that makes no sense.
        """
        for name, least in (("max_new_tokens", 2), ("rounds", 1), ("width", 1), ("chain_length", 1)):
            if getattr(self, name) < least:
                raise UserError(f"calibrate.{name} is {getattr(self, name)}: at least {least} is needed")
        if self.prompts is not None:
            if self.prompts.limit is not None and self.prompts.limit < 2:
                raise UserError(f"calibrate.prompts: limit {self.prompts.limit} is too few; give some dozens")
            if self.prompts.turns != 1:
                raise UserError("calibrate.prompts: turns must be 1, only first turns are decoded")
