"""The loss of drawn drafts against plain torch, and what it is for."""

import torch
import torch.nn.functional as F

from drafttrain.training.acceptance_loss import neg_log_acceptance
from drafttrain.training.losses import head_kl

N, H, D = 23, 16, 40


def plain(p, logits):
    """Return -log of the acceptance of each position [c]."""
    return -torch.minimum(p, logits.softmax(-1)).sum(-1).log()


def test_equals_plain_torch_through_the_head():
    torch.manual_seed(0)
    states, weight = torch.randn(N, H, requires_grad=True), torch.randn(D, H, requires_grad=True)
    teacher, head = torch.randn(N, H), torch.randn(D, H)
    loss, _ = head_kl(states, weight, teacher, lambda x: x @ head.T, 7, divergence=neg_log_acceptance)
    expected = plain((teacher @ head.T).softmax(-1), states @ weight.T).sum()
    torch.testing.assert_close(loss, expected)
    for got, wanted in zip(
        torch.autograd.grad(loss * 0.37, (states, weight)),
        torch.autograd.grad(expected * 0.37, (states, weight)),
    ):
        torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_is_cross_entropy_where_the_target_is_certain():
    torch.manual_seed(0)
    logits, best = torch.randn(N, D), torch.randint(0, D, (N,))
    loss, gradient = neg_log_acceptance(F.one_hot(best, D).float(), logits.log_softmax(-1))
    torch.testing.assert_close(loss[:, 0], F.cross_entropy(logits, best, reduction="none"))
    torch.testing.assert_close(gradient, logits.softmax(-1) - F.one_hot(best, D).float())


def test_equal_distributions_lose_nothing():
    torch.manual_seed(0)
    log_q = torch.randn(N, D).log_softmax(-1)
    loss, gradient = neg_log_acceptance(log_q.exp(), log_q)
    assert loss.abs().max() < 1e-6 and gradient.abs().max() < 1e-6


def test_distributions_without_common_tokens_stay_finite():
    log_q = torch.tensor([[0.0, float("-inf")]])
    loss, gradient = neg_log_acceptance(torch.tensor([[0.0, 1.0]]), log_q)
    assert loss.isfinite().all() and gradient.isfinite().all()


def test_more_drafts_are_accepted_than_by_kl_where_the_drafter_cannot_match():
    """One distribution for many of the target's."""
    torch.manual_seed(0)
    p = torch.distributions.Dirichlet(torch.full((12,), 0.3)).sample((20,))  # [20, 12]

    def fitted(gradient):
        logits = torch.zeros(1, 12)
        for _ in range(3000):
            logits -= 0.1 * gradient(logits.log_softmax(-1).expand(20, 12)).mean(0, keepdim=True)
        return plain(p, logits).mean()

    by_kl = fitted(lambda log_q: log_q.exp() - p)
    by_acceptance = fitted(lambda log_q: neg_log_acceptance(p, log_q)[1])
    assert by_acceptance < by_kl - 0.005
