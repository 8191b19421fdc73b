"""Limits of time and memory for code that came with a file."""

import contextlib
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

STATM = Path("/proc/self/statm")  # its first number: pages of this process's address space


@contextlib.contextmanager
def bounded(seconds: float, n_bytes: int) -> Iterator[None]:
    """Interrupt a block that takes longer or allocates more. Time is limited in the main thread only, where
    signals arrive; memory is limited on Linux only.

    Raises:
        TimeoutError, MemoryError: the block exceeds the limit.
    """

    def stop(number: int, frame: object) -> None:
        raise TimeoutError(f"takes more than {seconds:g} s")

    with contextlib.ExitStack() as stack:
        if STATM.exists():
            soft, hard = resource.getrlimit(resource.RLIMIT_AS)
            most = int(STATM.read_text().split()[0]) * resource.getpagesize() + n_bytes
            if soft == resource.RLIM_INFINITY or most < soft:
                resource.setrlimit(resource.RLIMIT_AS, (most, hard))
                stack.callback(resource.setrlimit, resource.RLIMIT_AS, (soft, hard))
        if threading.current_thread() is threading.main_thread():
            before, began = signal.signal(signal.SIGALRM, stop), time.monotonic()
            # repeatedly, as the interrupted code may catch the first one
            left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)

            def restore() -> None:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)
                if left:  # an alarm that was set outside
                    rest = max(left - (time.monotonic() - began), 1e-3)
                    signal.setitimer(signal.ITIMER_REAL, rest, interval)

            stack.callback(restore)
        yield
