"""Too little memory, in one line; free memory that goes back to the system."""

import ctypes
from collections.abc import Callable

from drafttrain.utils.errors import brief

# how torch puts it for the CPU, and C++ libraries
WORDS = ("can't allocate memory", "std::bad_alloc", "bad allocation", "Cannot allocate memory")


def memory_problem(error: BaseException) -> str | None:
    """Describe an allocation that failed, on this machine or a GPU; return None for other errors."""
    known = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's, for GPUs
    if not known and not any(words in str(error) for words in WORDS):
        return None
    reason = brief(error) or type(error).__name__
    return (
        f"memory: not enough for these settings ({reason}); lower batches, rows or lengths, or end what else "
        "uses it"
    )


def heap_trimmer() -> Callable[[int], int] | None:
    """Return glibc's `malloc_trim(bytes to keep)`; None with another C library."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # musl, macOS; Windows
        return None


def trim_heap() -> None:
    """Return free memory below what is in use to the system, where the C library can."""
    if (trim := heap_trimmer()) is not None:
        trim(0)
