"""The native KL of rows of logits and its gradient, against fp64."""

from itertools import product

import pytest
import torch

from drafttrain.kernels.build import CHOICE, library
from drafttrain.kernels.divergence import DTYPES, divergence


def expected(logits: torch.Tensor, teacher: torch.Tensor) -> tuple[torch.Tensor, ...]:
    log_q, log_p = (torch.log_softmax(one.double(), -1) for one in (logits, teacher))
    same = logits.max(-1).indices == teacher.max(-1).indices
    return (log_p.exp() * (log_p - log_q)).sum(-1), log_q.exp() - log_p.exp(), same


@pytest.mark.parametrize("width", [1, 5, 16, 17, 40, 4097])
@pytest.mark.parametrize("dtypes", [*product(DTYPES, DTYPES)], ids=str)
def test_it_is_plain_torchs(kernels, width, dtypes):
    logits, teacher = (torch.randn(30, width).mul(3).to(dtype) for dtype in dtypes)
    teacher[:7] = logits[:7]  # the same distribution
    losses, gradient, same = expected(logits, teacher)
    found, found_same = divergence(logits, teacher)
    torch.testing.assert_close(found.double(), losses, atol=1e-4, rtol=1e-5)
    atol = 1e-5 if logits.dtype == torch.float else 2**-9  # probabilities below 1, to 8 bits
    torch.testing.assert_close(logits.double(), gradient, atol=atol, rtol=2**-8)
    assert torch.equal(found_same, same)


def test_ties_take_the_first(kernels):
    logits, teacher = torch.zeros(3, 50), torch.zeros(3, 50)
    logits[:, [9, 40]], teacher[0, [9, 41]], teacher[1, [8, 9]], teacher[2, 40] = 1.0, 1.0, 1.0, 1.0
    assert divergence(logits, teacher)[1].tolist() == [True, False, False]


def test_nan_and_infinity_are_not_hidden(kernels):
    logits, teacher = torch.randn(4, 100), torch.randn(4, 100)
    logits[0, 3], logits[1, 99], teacher[2, 50] = torch.nan, torch.inf, torch.nan
    losses, _ = divergence(logits, teacher)
    assert losses.isnan().tolist() == [True, True, True, False]


def test_any_number_of_threads(kernels):
    logits, teacher, before = torch.randn(9, 300), torch.randn(9, 300), torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            own = logits.clone()
            results.append((*divergence(own, teacher), own))
    finally:
        torch.set_num_threads(before)
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:])


def test_none_and_unchanged_where_it_is_not_native(monkeypatch):
    logits, teacher = torch.randn(3, 20), torch.randn(3, 20)
    kept = logits.clone()
    assert divergence(logits.double(), teacher) is None
    assert divergence(logits[:, ::2], teacher[:, ::2]) is None
    assert divergence(logits.to("meta"), teacher.to("meta")) is None
    monkeypatch.setenv(CHOICE, "off")
    library.cache_clear()
    try:
        assert divergence(logits, teacher) is None
    finally:
        library.cache_clear()
    assert torch.equal(logits, kept)
