"""Who has the cores: the native library's threads, or torch's.

After an operator on several threads, torch's team spins for milliseconds on the cores that a native call
wants next. So while tokens are decoded torch's operators, which are small there, run on one thread.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

MOST = 255  # threads that the library counts in a byte
_native: int | None = None  # threads of native calls, while torch has one


def team_size() -> int:
    """Return the number of threads that a native call takes."""
    return min(_native or torch.get_num_threads(), MOST)


@contextmanager
def native_team() -> Iterator[None]:
    """Give the cores to native calls: inside, torch's operators run on one thread."""
    global _native
    if _native is not None:
        yield
        return
    _native = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(_native)
        _native = None
