"""Weighted positions and the mix of losses, against loops over positions."""

import pytest
import torch
import torch.nn.functional as F

from drafttrain.training.config import TrainingConfig
from drafttrain.training.emphasis import Emphasis, emphasis_of, first_of_blocks
from drafttrain.training.losses import head_kl
from drafttrain.training.masks import BlockLayout, random_blocks
from drafttrain.utils.errors import UserError

B, T, H, D = 3, 17, 8, 5


@pytest.fixture
def batch():
    """Rows of two documents each, some tokens of which are not trained."""
    document_start = torch.tensor([[0] * 9 + [9] * 8, [0] * 4 + [4] * 13, [0] * T])
    wanted = torch.rand(B, T) < 0.7
    return wanted, random_blocks(document_start, 2, 5, torch.Generator().manual_seed(0)).block_start


def slow_weights(wanted, block_start, right, least, failed) -> list[float]:
    """Of each wanted position: 1 until one of its block is wrong, `failed` for that, `least` afterwards."""
    flags, weights = iter(right.tolist()), []
    for row in range(B):
        reached, block = True, None
        for t in range(T):
            if not wanted[row, t]:
                continue
            if block_start[row, t] != block:
                reached, block = True, block_start[row, t]
            is_right = next(flags)
            weights.append((1.0 if is_right else failed) if reached else least)
            reached = reached and is_right
    return weights


@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize(
    ("share", "least", "failed"), [(0.0, 0.2, 1.0), (0.3, 1.0, 1.0), (0.5, 0.0, 3.0), (0.0, 1.0, 2.0)]
)
def test_equals_a_loop_over_positions(batch, chunk, share, least, failed):
    wanted, block_start = batch
    n = int(wanted.sum())
    states, weight = torch.randn(n, H, requires_grad=True), torch.randn(D, H, requires_grad=True)
    teacher, head = torch.randn(n, H), torch.randn(D, H)
    states.data[::2] = teacher[::2] * 3  # so that many agree
    weight.data[:] = head
    emphasis = Emphasis(share, least, failed, first_of_blocks(wanted, block_start))
    loss, agree = head_kl(states, weight, teacher, lambda x: x @ head.T, chunk, emphasis=emphasis)

    log_p, log_q = F.log_softmax(teacher @ head.T, -1), F.log_softmax(states @ weight.T, -1)
    best = log_p.argmax(-1)
    right = best == log_q.argmax(-1)
    assert agree == right.sum() and 0 < agree < n
    mixed = (1 - share) * log_p.exp() + share * F.one_hot(best, D)  # [n, D]
    kl = (torch.xlogy(mixed, mixed) - mixed * log_q).sum(-1)  # [n]
    expected = (torch.tensor(slow_weights(wanted, block_start, right, least, failed)) * kl).sum()
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)
    grads = torch.autograd.grad(loss, (states, weight))
    for got, slow in zip(grads, torch.autograd.grad(expected, (states, weight))):
        torch.testing.assert_close(got, slow, atol=1e-4, rtol=1e-4)


def test_only_blocks_can_be_weighted(batch):
    wanted, block_start = batch
    config = TrainingConfig(unreached_weight=0.5, failed_weight=2.0)
    made = emphasis_of(config, True)(wanted, BlockLayout(None, block_start))
    assert (made.argmax_share, made.unreached_weight, made.failed_weight) == (0.0, 0.5, 2.0)
    assert len(made.first) == int(wanted.sum())
    with pytest.raises(UserError, match="0, 1 and 1 with a drafter without blocks .*, got 0.0, 0.5 and 2.0"):
        emphasis_of(config, False)
    with pytest.raises(UserError, match="must be 0, 1 and 1 with loss: ce, got 0.1, 1.0 and 1.0"):
        emphasis_of(TrainingConfig(argmax_share=0.1, loss="ce"), True)


@pytest.mark.parametrize("key", ["argmax_share", "unreached_weight", "failed_weight"])
def test_any_of_the_keys_is_an_emphasis(key):
    assert not TrainingConfig().has_emphasis
    assert TrainingConfig(**{key: 2.0 if key == "failed_weight" else 0.5}).has_emphasis
