"""Resources of a scheduler's thread: a share of the CPU cores, or a separate CUDA stream."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from drafttrain.target_lm.model import FrozenTarget


@contextmanager
def own_cores(target: FrozenTarget, threads: int | None) -> Iterator[None]:
    """Run this thread's forwards on this many threads, in the native library or else in torch's operators."""
    if target.native is not None or threads is None:
        with target.own_cores(threads):
            yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Run this thread's GPU work on a separate CUDA stream; do nothing on a CPU."""
    with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
        yield
