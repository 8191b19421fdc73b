"""Giving free heap memory back to the system."""

import ctypes
from collections.abc import Callable


def heap_trimmer() -> Callable[[int], int] | None:
    """Return glibc's `malloc_trim(bytes to keep)`; None with another C library."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # musl, macOS; Windows
        return None


def trim_heap() -> None:
    """Give free memory back to the system, also below blocks in use, if the C library can."""
    if (trim := heap_trimmer()) is not None:
        trim(0)
