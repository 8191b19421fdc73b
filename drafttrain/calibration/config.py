"""Settings of the calibration stage."""

from dataclasses import dataclass
from typing import Literal

from drafttrain.data.config import PromptSet
from drafttrain.utils.errors import UserError
from drafttrain.utils.ranges import check_ranges, setting

STRICTNESS = (1.0, 1.4, 2.0, 2.8)  # rates to beat that are tried, relative to an EAGLE-2 tree's
BETAS = (0.05, 0.08, 0.12, 0.18, 0.26)  # thresholds that are tried where C2T has no `expand`
C2T_TRIALS = len(BETAS) + len(STRICTNESS)


@dataclass
class CalibrateConfig:
    """How a drafter is calibrated (section `calibrate` of a recipe).

    Attributes:
        prompts: prompts to decode; none of a benchmark.
        quick: calibrate in some seconds on built-in prompts, as decoding does where it needs costs. The keys
            below have no effect then, except `busy`.
        max_new_tokens: tokens decoded per prompt at most.
        rounds: measurements of each size.
        width: children of an expanded node in trees.
        chain_length: tokens of the drafted chains whose confidence is compared with acceptance.
        busy: what to do when other processes would spoil the timings.
    """

    prompts: PromptSet | None = None
    quick: bool = False
    max_new_tokens: int = setting(96, ge=2)
    rounds: int = setting(15, ge=1)
    width: int = setting(4, ge=1, le=16)
    chain_length: int = setting(10, ge=1)
    busy: Literal["warn", "refuse"] = setting("warn", metadata={"changes_output": False})

    @property
    def is_asked(self) -> bool:
        """Return whether the settings ask for a calibration."""
        return self.quick or self.prompts is not None

    def check(self) -> None:
        """Validate the settings.

        Raises:
            UserError: a value out of range.
        """
        check_ranges(self, "calibrate")
        if self.quick and self.prompts is not None:
            raise UserError("calibrate.quick: must be without calibrate.prompts, got both; leave one out")
        if self.prompts is not None:
            if self.prompts.limit is not None and self.prompts.limit < 2:
                raise UserError(
                    f"calibrate.prompts.limit: must be >= 2, got {self.prompts.limit}; give some dozens"
                )
            if self.prompts.turns != 1:
                raise UserError(
                    f"calibrate.prompts.turns: must be 1, as only first turns are decoded, got "
                    f"{self.prompts.turns}"
                )
