"""Buffers in huge pages are ordinary tensors; what is advised is within them."""

from types import SimpleNamespace

import pytest
import torch

from drafttrain.kernels import memory


@pytest.mark.parametrize("size", [0, 1000, memory.MAPPED // 4 - 1, memory.MAPPED // 4, 9_000_003])
def test_advised_are_whole_pages_of_the_tensor(monkeypatch, size):
    advised = []
    native = SimpleNamespace(advise_huge=lambda begin, length: advised.append((begin, length)))
    monkeypatch.setattr(memory, "library", lambda: native)
    tensor = memory.empty((size,), torch.float32, "cpu")
    first, end = tensor.data_ptr(), tensor.data_ptr() + 4 * size
    pages = range(-(-first // memory.HUGE_PAGE), end // memory.HUGE_PAGE) if 4 * size >= memory.MAPPED else []
    assert advised == ([(pages[0] * memory.HUGE_PAGE, len(pages) * memory.HUGE_PAGE)] if pages else [])


@pytest.mark.parametrize("native", [True, False])
def test_every_element_can_be_written(monkeypatch, native):
    if not native:
        monkeypatch.setattr(memory, "library", lambda: None)
    tensor = memory.empty((3, 7_000_001), torch.float32, "cpu")
    assert tensor.shape == (3, 7_000_001) and tensor.dtype == torch.float32
    tensor[:] = torch.arange(3.0)[:, None]
    assert torch.equal(tensor.double().sum(1), torch.tensor([0.0, 7_000_001, 14_000_002], dtype=torch.double))
