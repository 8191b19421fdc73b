"""How tokens are drawn, as a caller says it; `sampling.py` draws them."""

from dataclasses import dataclass

from drafttrain.utils.errors import UserError


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn.

    Attributes:
        temperature: 0 is greedy.
        top_p: the smallest set of most probable tokens that together have this probability.
        top_k: at most this many of the most probable tokens; None: all.
        seed: of this output's draws.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, kinds in (("temperature", (int, float)), ("top_p", (int, float)), ("seed", (int,))):
            value = getattr(self, name)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise UserError(
                    f"{name}: must be a {'whole ' if kinds == (int,) else ''}number, got {value!r}"
                )
        if self.top_k is not None and (not isinstance(self.top_k, int) or isinstance(self.top_k, bool)):
            raise UserError(f"top_k: must be a whole number or None, got {self.top_k!r}")
        if not 0 <= self.temperature < float("inf"):
            raise UserError(f"temperature: must be >= 0 and finite, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p: must be > 0 and <= 1, got {self.top_p}")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k: must be >= 1, got {self.top_k}")
