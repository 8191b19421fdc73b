"""SEED on hardware that waits: forwards hold their device for declared times and overlap for real.

The real tokens are computed beside it. A forward of the target takes 40 ms for up to 32 tokens, a step of the
drafter 4 ms for up to 8 sequences, each on a device of its own.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from drafttrain.reasoning.scheduler import Branch, Pace
from drafttrain.trees.tree import TokenTree

TARGET_SECONDS, TARGET_TOKENS = 0.040, 32
STEP_SECONDS, STEP_SEQUENCES = 0.004, 8


@dataclass
class Paced(Pace):
    """Holds devices.

    Attributes:
        pieces: pieces of work so far.
        late: those whose computation alone took longer than declared.
    """

    pieces: int = 0
    late: int = 0
    lateness: list[float] = field(default_factory=list)

    def prefilled(self, began: float, tokens: int) -> None:
        self._hold(began, _parts(tokens, TARGET_TOKENS) * TARGET_SECONDS)

    def drafted(self, began: float, branches: Sequence[Branch]) -> None:
        steps = max(int(branch.tree.depths.max()) for branch in branches)
        self._hold(began, steps * _parts(len(branches), STEP_SEQUENCES) * STEP_SECONDS)

    def verified(self, began: float, trees: Sequence[TokenTree]) -> None:
        self._hold(began, _parts(sum(tree.width for tree in trees), TARGET_TOKENS) * TARGET_SECONDS)

    def _hold(self, began: float, seconds: float) -> None:
        left = began + seconds - time.perf_counter()
        self.pieces += 1
        if left > 0:
            time.sleep(left)
        elif seconds:
            self.late += 1
            self.lateness.append(-left)


def _parts(n: int, size: int) -> int:
    return -(-n // size)
