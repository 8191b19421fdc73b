"""Draws from logits against the softmax written out."""

import pytest
import torch

from drafttrain.inference.sampling import uniform
from drafttrain.kernels.build import CHOICE, library
from drafttrain.kernels.draw import draw, draw_logits, uniforms

WIDTHS = (1, 3, 15, 16, 17, 1023, 1024, 1025, 5000)


def by_hand(logits: torch.Tensor, temperature: float, uniform: float) -> tuple[int, float]:
    """The token at `uniform` of the cumulative distribution, and how far that is from the nearest border."""
    cumulative = (logits.double() / temperature).softmax(-1).cumsum(-1)
    distance = (cumulative - uniform).abs().min()
    return int((cumulative <= uniform).sum().clamp(max=len(logits) - 1)), float(distance)


@pytest.mark.parametrize("width", WIDTHS)
def test_draws_invert_the_cumulative_softmax(kernels, width):
    random = torch.Generator().manual_seed(width)
    logits = 3 * torch.randn(40, width, generator=random)
    temperature = 0.3 + torch.rand(40, generator=random)
    uniform = torch.rand(40, generator=random, dtype=torch.float64)
    tokens, log_masses = draw_logits(logits, temperature, uniform)
    torch.testing.assert_close(log_masses, (logits.double() / temperature[:, None]).logsumexp(-1))
    for row in range(40):
        expected, distance = by_hand(logits[row], float(temperature[row]), float(uniform[row]))
        assert tokens[row] == expected or distance < 1e-6


def test_very_low_temperatures_leave_the_mass_exact(kernels):
    """A rounded product of a logit and 1 / temperature would be off by more than a probability."""
    logits = 18 + torch.rand(30, 40, generator=torch.Generator().manual_seed(0))
    temperature = torch.full((30,), 1e-5)
    factor = (1 / temperature).double()[:, None]
    log_masses = draw_logits(logits, temperature, torch.full((30,), 0.5, dtype=torch.float64))[1]
    torch.testing.assert_close(log_masses, (logits.double() * factor).logsumexp(-1), rtol=0, atol=1e-6)


def test_the_ends_of_the_range_draw_what_has_mass(kernels):
    logits = torch.full((2, 3000), -torch.inf)
    logits[:, [1500, 1700]] = 0.0
    ends = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    tokens, log_masses = draw_logits(logits, torch.ones(2), ends)
    assert tokens.tolist() == [1500, 1700]
    torch.testing.assert_close(log_masses.exp(), torch.tensor([2.0, 2.0], dtype=torch.float64))


def test_the_first_of_what_is_not_finite_is_found(kernels):
    logits = torch.randn(4, 2000)
    logits[0, [1200, 1300]], logits[1, 77] = torch.nan, torch.inf
    logits[2, [5, 1999]] = torch.tensor([torch.inf, torch.nan])
    logits[3] = -torch.inf
    tokens, log_masses = draw_logits(logits, torch.ones(4), torch.full((4,), 0.5, dtype=torch.float64))
    assert tokens.tolist() == [1200, 77, 1999, 0]
    assert log_masses.isnan().all()


def test_a_row_alone_is_as_in_a_batch(kernels):
    logits, uniform = torch.randn(7, 4000), torch.rand(7, dtype=torch.float64)
    together = draw_logits(logits, torch.full((7,), 0.7), uniform)
    for row in range(7):
        one = slice(row, row + 1)
        alone = draw_logits(logits[one], torch.full((1,), 0.7), uniform[one])
        assert all(torch.equal(a, b[one]) for a, b in zip(alone, together))


def test_torch_draws_the_same_without_the_library(monkeypatch):
    logits, uniform = 3 * torch.randn(50, 3000), torch.rand(50, dtype=torch.float64)
    tokens, log_masses = draw_logits(logits, torch.full((50,), 0.8), uniform)
    monkeypatch.setenv(CHOICE, "off")
    library.cache_clear()
    try:
        plain, plain_masses = draw_logits(logits, torch.full((50,), 0.8), uniform)
    finally:
        monkeypatch.undo()
        library.cache_clear()
    torch.testing.assert_close(log_masses, plain_masses)
    for row in torch.nonzero(tokens != plain).flatten().tolist():
        assert by_hand(logits[row], 0.8, float(uniform[row]))[1] < 1e-6


def test_probabilities_may_be_given():
    probs = torch.tensor([[0.25, 0.0, 0.5, 0.25], [0.0, 1.0, 0.0, 0.0]])
    uniform = torch.tensor([[0.0, 0.3, 0.7499, 0.75, 1 - 2**-53]], dtype=torch.float64)
    assert [draw(probs[:1], one[None]).item() for one in uniform[0]] == [0, 2, 2, 3, 3]
    assert [draw(probs[1:], one[None]).item() for one in uniform[0]] == [1] * 5


def test_uniform_numbers_of_many_positions_are_those_of_each():
    seeds, positions = (0, 7, 2**63 - 1, 2**64 + 5, -1), range(3, 8)
    expected = [
        [[uniform(seed, position, number) for number in range(4)] for position in positions] for seed in seeds
    ]
    assert uniforms(seeds, positions, 4).tolist() == expected
