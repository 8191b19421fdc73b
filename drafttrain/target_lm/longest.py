"""The largest of some lengths on a GPU, for the host."""

import torch


class Longest:
    """The largest of lengths [B] on a GPU, whose copy to the host begins now."""

    def __init__(self, lengths: torch.Tensor):
        self._copy = lengths.max().to("cpu", non_blocking=True)  # into pinned memory
        self._copied = torch.cuda.Event()
        self._copied.record(torch.cuda.current_stream(lengths.device))

    def is_known(self) -> bool:
        """Return whether the copy has arrived."""
        return self._copied.query()

    def value(self) -> int:
        """Return the length; wait until the copy has arrived."""
        self._copied.synchronize()
        return int(self._copy)
