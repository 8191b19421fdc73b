"""Sharing of the cores between the native library's threads and torch's.

After an operator on several threads, torch's team spins for milliseconds on the cores that a native call
wants next. So while tokens are decoded torch's operators, which are small there, run on one thread. Each
Python thread has its own team; native calls of several Python threads wait for each other, unless each takes
one thread.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from drafttrain.kernels.cores import Cores

MOST = 255  # most threads of a team: the library counts them in a byte


class _Native(threading.local):
    size: int | None = None  # threads of native calls, while torch has one


_native, _lock = _Native(), threading.Lock()
# open teams, and torch's threads outside: a Python thread whose first operator runs inside inherits 1
_outside = [0, 1]
cores = Cores()


def team_size() -> int:
    """Return the number of threads that a native call takes: fewer where other processes have the cores."""
    return cores.fit(min(_native.size or torch.get_num_threads(), MOST))


def _threads_of_others() -> int:
    """Return the number of threads that torch has in a Python thread that starts now."""
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    return found[0]


@contextmanager
def native_team(threads: int | None = None) -> Iterator[None]:
    """Give the cores to this thread's native calls: inside, torch's operators run on one thread.

    Args:
        threads: number for a native call. None: as many as torch has outside, or as an outer `native_team`.
    """
    outer, own = _native.size, torch.get_num_threads()
    if outer is None:
        with _lock:
            if not _outside[0] and (own > 1 or _threads_of_others() == 1):  # chosen, not inherited
                _outside[1] = own
            _outside[0] += 1
            own = _outside[1] if own == 1 else own
        torch.set_num_threads(1)
    _native.size = threads or outer or own
    try:
        yield
    finally:
        _native.size = outer
        if outer is None:
            with _lock:
                _outside[0] -= 1
            torch.set_num_threads(own)
