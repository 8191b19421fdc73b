"""Free memory goes back to the system between steps."""

import ctypes
import os
from types import SimpleNamespace

import pytest
import torch

from drafttrain.training import trim_heap as heap
from drafttrain.training.trim_heap import EVERY, TrimHeap
from drafttrain.utils.heap import heap_trimmer

MB = 1e6


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def trim():
    found = heap_trimmer()
    if found is None:
        pytest.skip("the C library is not glibc")
    return found


def test_what_is_free_below_something_used_goes_back(trim):
    trim(0)
    before = resident()
    held = [torch.ones(25_000) for _ in range(2000)]  # 200 MB in parts that come from the heap
    del held[:-1]  # the last one keeps the heap's end where it is
    kept = resident() - before
    assert kept > 150 * MB, "the heap gave it back by itself: this test is of no use"
    trim(0)
    assert resident() - before < kept - 100 * MB
    assert float(held[0].sum()) == 25_000


def test_now_and_then_and_not_at_every_step(monkeypatch):
    calls = []
    monkeypatch.setattr(heap, "heap_trimmer", lambda: calls.append)
    callback = TrimHeap()
    for step in range(1, 2 * EVERY + 1):
        callback.on_step_end(None, SimpleNamespace(global_step=step), None)
    assert calls == [0, 0]


def test_nothing_is_done_with_another_c_library(monkeypatch):
    class Library:
        def __init__(self, name):
            pass

    monkeypatch.setattr(ctypes, "CDLL", Library)
    assert heap_trimmer() is None
    TrimHeap().on_step_end(None, SimpleNamespace(global_step=EVERY), None)
