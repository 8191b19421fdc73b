"""The first maximum and the largest entries of rows against torch's."""

import pytest
import torch

from drafttrain.kernels.build import CHOICE, library
from drafttrain.kernels.largest import largest
from drafttrain.kernels.maximum import first_maximum


@pytest.mark.parametrize("width", [1, 3, 16, 17, 63, 64, 65, 4095, 4096, 4097, 12289])
@pytest.mark.parametrize("rounded", [False, True])  # many ties
def test_it_is_torchs(kernels, width, rounded):
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(width)) * 3
    x = x.round() if rounded else x
    assert torch.equal(first_maximum(x), x.max(-1).indices)


@pytest.mark.parametrize("width", [4, 17, 65, 4095, 4097, 12289])
@pytest.mark.parametrize("rounded", [False, True])
def test_the_largest_are_those_of_a_stable_sort(kernels, width, rounded):
    x = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(width)) * 3
    x = x.round() if rounded else x
    order = x.argsort(dim=-1, descending=True, stable=True)
    for k in (1, 2, 4):
        assert torch.equal(largest(x, k), order[..., :k])
    assert largest(x[:0], 4).shape == (0, 3, 4)
    with pytest.raises(ValueError, match=f"k: must be >= 1 and <= {width}, got {width + 1}"):
        largest(x, width + 1)


def test_nan_and_infinity(kernels):
    x = torch.randn(6, 5000)
    x[0, 4500], x[0, 77] = torch.nan, torch.nan
    x[1, 4500], x[2] = torch.inf, -torch.inf
    x[3, :4900] = -torch.inf  # a whole part of what is looked at together
    x[4] = torch.nan
    assert torch.equal(first_maximum(x), x.max(-1).indices)
    assert first_maximum(x)[[0, 1, 2, 4]].tolist() == [77, 4500, 0, 0]


def test_any_number_of_threads(kernels):
    x, before = torch.randn(9, 30_000).mul(8).round(), torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            assert torch.equal(first_maximum(x), x.max(-1).indices), threads
    finally:
        torch.set_num_threads(before)


def test_any_shape_and_layout(kernels):
    x = torch.randn(2, 3, 40)
    found = first_maximum(x)
    assert found.shape == (2, 3) and first_maximum(x[:0]).shape == (0, 3)
    assert torch.equal(39 - first_maximum(x.transpose(0, 1).flip(-1)), found.T)


def test_torch_does_it_without_the_library(monkeypatch):
    x = torch.randn(3, 500)
    found = first_maximum(x)
    monkeypatch.setenv(CHOICE, "off")
    library.cache_clear()
    try:
        assert torch.equal(first_maximum(x), found)
        assert torch.equal(largest(x, 3), x.topk(3).indices)
    finally:
        library.cache_clear()
    assert torch.equal(first_maximum(x.bfloat16()), x.bfloat16().max(-1).indices)
    assert torch.equal(largest(x.bfloat16(), 3), x.bfloat16().topk(3).indices)
