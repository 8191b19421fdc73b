"""Give a thread of the scheduler its share of the cores, or a stream of its own on a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from drafttrain.target_lm.model import FrozenTarget


@contextmanager
def own_cores(target: FrozenTarget, threads: int | None) -> Iterator[None]:
    """Give N threads to this thread's forwards: native ones, or torch's operators without them."""
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
    """On a GPU, give this thread a stream of its own."""
    with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
        yield
