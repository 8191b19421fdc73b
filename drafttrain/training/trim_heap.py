"""Memory that the C library keeps between training steps.

Rows have another number of trained tokens in each step, so tensors of ever new sizes are made and freed, and
glibc's heap grows around the holes: five MEDUSA heads, whose tensors take 0.8 GB, held 3 GB after 30 steps on
a CPU and 12 GB after 300.
"""

import ctypes
from collections.abc import Callable

from transformers import TrainerCallback

EVERY = 10  # steps: what was given back has to be asked for again, which takes a tenth of a second


class TrimHeap(TrainerCallback):
    """Gives what is free in the heap back to the system."""

    def __init__(self) -> None:
        self.trim = heap_trimmer()

    def on_step_end(self, args, state, control, **kwargs):
        if self.trim is not None and state.global_step % EVERY == 0:
            self.trim(0)


def heap_trimmer() -> Callable[[int], int] | None:
    """glibc's `malloc_trim`, which keeps so many bytes at the heap's end and gives back the rest that is free
    (malloc_trim(3)); None where the C library is another."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # musl, macOS; Windows
        return None
