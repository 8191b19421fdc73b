"""ChainPolicy drafts the drafter's greedy continuation."""

import pytest
import torch

from drafttrain.trees.chain import ChainPolicy
from drafttrain.trees.drafter import Drafter


class BigramDrafter(Drafter):
    """Draft token j is target token 10 + j; what follows a token depends on that token alone."""

    draft_vocab_size = 5

    def __init__(self):
        self.table = torch.randn(20, 5).log_softmax(-1)  # target token -> draft log-probabilities
        self.expanded = []

    def to_target(self, ids):
        return ids + 10

    def expand(self, state, tree, frontier):
        self.expanded.append((state, frontier.tolist()))
        return self.table[tree.tokens.gather(1, frontier)]


@pytest.mark.parametrize("length", [0, 1, 4])
def test_chain_is_the_greedy_continuation(length):
    drafter, state = BigramDrafter(), object()
    policy = ChainPolicy(length)
    tree = policy.grow(drafter, state, torch.tensor([3, 14]))
    assert policy.max_depth == length
    assert drafter.expanded == [(state, [[i], [i]]) for i in range(length)]
    for row, root in enumerate([3, 14]):
        tokens, log_probs = [root], [0.0]
        for _ in range(length):
            best = drafter.table[tokens[-1]].argmax()
            log_probs.append(drafter.table[tokens[-1]][best].item())
            tokens.append(int(best) + 10)
        assert tree.tokens[row].tolist() == tokens
        assert tree.log_probs[row].tolist() == log_probs
        assert tree.parents[row].tolist() == list(range(-1, length))
        assert tree.depths[row].tolist() == list(range(length + 1))
    assert tree.sizes.tolist() == [length + 1] * 2
