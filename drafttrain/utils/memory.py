"""Failed allocations, reported in one line."""

from drafttrain.utils.errors import brief

# messages of torch for the CPU, and of C++ libraries
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
