"""Limits of time and memory for code that came with a file."""

import contextlib
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

STATM = Path("/proc/self/statm")  # its first number: pages of this process's address space
_memory = threading.Lock()
_blocks: list[
    tuple[int, int]
] = []  # for each block that is running, the limits to set after the last of them


@contextlib.contextmanager
def bounded(seconds: float, n_bytes: int) -> Iterator[None]:
    """Interrupt a block that takes longer or allocates more. Time is the thread's on the processor, so that a
    stopped process gets on; it is limited in the main thread only, where signals arrive. Memory is limited on
    Linux only, for the process: blocks of several threads share the first one's limit.

    Raises:
        TimeoutError, MemoryError: the block exceeds the limit.
    """

    worked = time.thread_time()

    def stop(number: int, frame: object) -> None:
        if time.thread_time() - worked > 0.9 * seconds:  # else it comes again
            raise TimeoutError(f"takes more than {seconds:g} s")

    with contextlib.ExitStack() as stack:
        if STATM.exists():
            _limit_memory(n_bytes)
            stack.callback(_lift_limit)
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


def _limit_memory(n_bytes: int) -> None:
    with _memory:
        soft, hard = before = _blocks[0] if _blocks else resource.getrlimit(resource.RLIMIT_AS)
        most = int(STATM.read_text().split()[0]) * resource.getpagesize() + n_bytes
        if not _blocks and (soft == resource.RLIM_INFINITY or most < soft):
            resource.setrlimit(resource.RLIMIT_AS, (most, hard))
        _blocks.append(before)


def _lift_limit() -> None:
    with _memory:
        before = _blocks.pop()
        if not _blocks:
            resource.setrlimit(resource.RLIMIT_AS, before)
