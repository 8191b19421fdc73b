"""The fused loss against plain torch: value, agreement and both gradients."""

import pytest
import torch
import torch.nn.functional as F

from drafttrain.training import losses
from drafttrain.training.losses import head_kl

N, H, D = 23, 16, 40


@pytest.fixture(params=["native", "torch"])
def implementation(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(losses, "native_divergence", lambda logits, teacher: None)


def example(cap: float | None = None):
    states, weight = torch.randn(N, H, requires_grad=True), torch.randn(D, H, requires_grad=True)
    teacher, head = torch.randn(N, H), torch.randn(D, H)

    def logits(final: torch.Tensor) -> torch.Tensor:
        out = final @ head.T
        return out if cap is None else cap * torch.tanh(out / cap)

    return states, weight, teacher, logits


def plain(states, weight, teacher, logits):
    p, q = logits(teacher), states @ weight.T
    loss = F.kl_div(F.log_softmax(q, -1), F.log_softmax(p, -1), reduction="sum", log_target=True)
    return loss, (p.argmax(-1) == q.argmax(-1)).sum()


@pytest.mark.parametrize("chunk", [1, 7, 23, 1000])
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("segment", [1, 10 * D, losses.SEGMENT])
def test_equals_plain_torch(implementation, monkeypatch, chunk, cap, segment):
    monkeypatch.setattr(losses, "SEGMENT", segment)
    states, weight, teacher, logits = example(cap)
    states.data[:5] = teacher[:5] * 3  # some positions agree
    weight.data[:] = torch.linalg.lstsq(teacher, logits(teacher)).solution.T
    loss, agree = head_kl(states, weight, teacher, logits, chunk)
    expected, expected_agree = plain(states, weight, teacher, logits)
    torch.testing.assert_close(loss, expected, atol=1e-3, rtol=1e-5)
    assert agree == expected_agree and 5 <= agree < N
    grads = torch.autograd.grad(loss * 0.37, (states, weight))
    expected_grads = torch.autograd.grad(expected * 0.37, (states, weight))
    for got, wanted in zip(grads, expected_grads):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_a_perfect_student_loses_nothing(implementation):
    states, _, teacher, logits = example()
    head = logits(torch.eye(H)).T.clone().requires_grad_()
    states.data[:] = teacher
    loss, agree = head_kl(states, head, teacher, logits)
    assert abs(loss.item()) < 1e-4 and agree == N
    assert torch.autograd.grad(loss, states)[0].abs().max() < 1e-5


def test_frozen_head_gets_no_gradient(implementation):
    states, weight, teacher, logits = example()
    weight.requires_grad_(False)
    loss, _ = head_kl(states, weight, teacher, logits)
    expected, _ = plain(states, weight, teacher, logits)
    torch.testing.assert_close(
        torch.autograd.grad(loss, states)[0], torch.autograd.grad(expected, states)[0], atol=1e-4, rtol=1e-4
    )


def test_without_gradients(implementation):
    states, weight, teacher, logits = example()
    with torch.no_grad():
        loss, _ = head_kl(states, weight, teacher, logits, chunk=5)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, plain(states, weight, teacher, logits)[0].detach())


def test_nothing_to_train(implementation):
    """A batch without trained positions has loss 0 and gradients of 0, as other ranks wait for them."""
    states, weight, teacher, logits = example()
    loss, agree = head_kl(states[:0], weight, teacher[:0], logits)
    loss.backward()
    assert loss == 0 and agree == 0 and not weight.grad.any() and not states.grad.any()


def test_bf16_products_keep_dtypes_and_stay_close(implementation):
    states, weight, teacher, logits = example()
    loss, _ = head_kl(states, weight, teacher, logits, dtype=torch.bfloat16)
    expected, _ = plain(states, weight, teacher, logits)
    torch.testing.assert_close(loss, expected, atol=0, rtol=0.02)
    grads = torch.autograd.grad(loss, (states, weight))
    expected_grads = torch.autograd.grad(expected, (states, weight))
    for got, wanted in zip(grads, expected_grads):
        assert got.dtype == torch.float32
        assert (got - wanted).norm() < 0.02 * wanted.norm()
