"""Sampling parameters, as callers set them; `sampling.py` draws with them."""

from dataclasses import dataclass

from drafttrain.utils.errors import UserError


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one output.

    Attributes:
        temperature: 0 is greedy.
        top_p: draw from the smallest set of most probable tokens that together have this probability.
        top_k: draw from at most this many of the most probable tokens; None: all.
        seed: seed of this output's draws.
        max_tokens: limit of this output, in place of max_new_tokens; None: max_new_tokens.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, kinds in (("temperature", (int, float)), ("top_p", (int, float)), ("seed", (int,))):
            value = getattr(self, name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise UserError(
                    f"{name}: must be a {'whole ' if kinds == (int,) else ''}number, got {value!r}"
                )
        for name in ("top_k", "max_tokens"):
            value = getattr(self, name)
            if value is not None and type(value) is not int:
                raise UserError(f"{name}: must be a whole number or None, got {value!r}")
            if value is not None and value < 1:
                raise UserError(f"{name}: must be >= 1, got {value}")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature: must be >= 0 and finite, got {self.temperature}")
        if self.temperature < 1e-6:  # 1 / temperature has to be an fp32 number
            object.__setattr__(self, "temperature", 0.0)
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: must be > 0 and <= 1, got {self.top_p}")
