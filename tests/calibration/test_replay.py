"""Policies over recorded trees against tokens and seconds counted by hand, the best rate against others."""

import dataclasses
import math

import pytest
import torch

from drafttrain.bundle import load_bundle
from drafttrain.calibration.judged import Decoding
from drafttrain.calibration.replay import RecordedTree, RecordedTrees, best_rate, predicted_rate
from drafttrain.trees.chain import ChainPolicy
from drafttrain.trees.costs import EXAMPLE_COSTS, AcceptanceCurve, CostCurve, Costs
from drafttrain.trees.eagle2 import Eagle2Policy
from drafttrain.trees.interface import TreePolicy
from drafttrain.trees.timed import TimedPolicy
from drafttrain.trees.tree import TokenTree

EIGHTHS = [-9 + i / 8 for i in range(73)]
TRUE = AcceptanceCurve(EIGHTHS, [math.exp(x) for x in EIGHTHS])  # nodes are accepted as often as they promise
COSTS = Costs(
    CostCurve((1, 8), (1e-3, 2e-3)),
    CostCurve((1, 64), (20e-3, 80e-3)),
    CostCurve((1, 64), (20e-3, 80e-3)),
    50.0,
    (0.7,),
    TRUE,
)


def drawn_tree(generator: torch.Generator, width: int = 3, depth: int = 4) -> RecordedTree:
    """A full tree of random probabilities. The target draws its path by them, or leaves the tree."""
    parents, log_probs, layer = [-1], [0.0], [0]
    children: dict[int, list[int]] = {}
    for _ in range(depth):
        following = []
        for node in layer:
            shares = torch.rand(width + 1, generator=generator) ** 4
            shares = (shares / shares.sum())[:width].sort(descending=True).values
            children[node] = list(range(len(parents), len(parents) + width))
            following += children[node]
            parents += [node] * width
            log_probs += shares.log().tolist()
        layer = following
    accepted, node = torch.zeros(len(parents), dtype=torch.bool), 0
    accepted[0] = True
    while node in children:
        shares = torch.tensor([log_probs[child] for child in children[node]]).exp()
        drawn = int(torch.multinomial(torch.cat([shares, 1 - shares.sum()[None]]), 1, generator=generator))
        if drawn == width:
            break
        node = children[node][drawn]
        accepted[node] = True
    return RecordedTree(torch.tensor(parents), torch.tensor(log_probs), accepted)


@pytest.fixture(scope="module")
def trees() -> list[RecordedTree]:
    generator = torch.Generator().manual_seed(0)
    return [drawn_tree(generator) for _ in range(40)]


@pytest.mark.parametrize("length", [1, 2, 4, 6])
def test_a_chain_by_hand(trees, length):
    """A chain follows the first child of each node, and past the recorded depth all it drafts is wrong."""
    tokens = 0
    for recorded in trees:
        node = 0
        tokens += 1  # the target's own
        for _ in range(length):
            below = (recorded.parents == node).nonzero().flatten().tolist()
            if not below or not recorded.accepted[below[0]]:
                break
            node = below[0]
            tokens += 1
    seconds = len(trees) * (length * COSTS.draft(1) + COSTS.verify(length + 1))
    assert predicted_rate(trees, ChainPolicy(length), COSTS) == pytest.approx(tokens / seconds)


def test_the_best_rate_is_as_good_as_any(trees):
    def speed(rate):
        policy = TimedPolicy(**{**TimedPolicy.calibrated(COSTS), "rate": rate}, width=3)
        return predicted_rate(trees, policy, COSTS)

    rate, reached = best_rate(trees, COSTS, 3)
    assert reached == speed(rate)
    grid = [speed(5.0 * 1.3**i) for i in range(17)]  # 5 to 330 tokens/s
    assert max(grid) * 0.97 <= reached <= max(grid) * 1.02
    assert reached > speed(1e-3) and reached > 1 / COSTS.verify(1)  # than whole trees, and than none


@pytest.mark.parametrize("factor", [0.1, 3.0])
def test_a_slower_machine_has_lower_rates_and_the_same_trees(trees, factor):
    def slower(curve):
        return CostCurve(curve.sizes, tuple(factor * seconds for seconds in curve.seconds))

    curves = {name: slower(getattr(COSTS, name)) for name in ("draft", "verify", "target")}
    there = dataclasses.replace(COSTS, rate=COSTS.rate / factor, **curves)
    expected = [number / factor for number in best_rate(trees, COSTS, 3)]
    assert best_rate(trees, there, 3) == pytest.approx(expected, rel=1e-4)


def test_costly_verification_is_beaten_by_fewer_tokens(trees):
    """Where each token to verify costs as much as the first, the best rate drafts hardly anything."""
    steep = dataclasses.replace(COSTS, verify=CostCurve((1, 64), (20e-3, 1280e-3)))

    def nodes(costs):
        rate, _ = best_rate(trees, costs, 3)
        policy, total = TimedPolicy(**{**TimedPolicy.calibrated(costs), "rate": rate}, width=3), []

        class Counted(TreePolicy):
            max_depth = policy.max_depth

            def grow(self, drafter, state, root):
                tree = policy.grow(drafter, state, root)
                total.append(tree.width)
                return tree

        predicted_rate(trees, Counted(), costs)
        return sum(total) / len(total)

    assert nodes(steep) < nodes(COSTS)


def test_recorded_trees_are_those_of_the_decoding(tiny_bundle):
    loaded = load_bundle(tiny_bundle, dtype="float32", device="cpu")
    recorded = RecordedTrees()
    policy = Eagle2Policy(3, max_depth=3, total=None)
    decoding = Decoding(loaded.target, loaded.drafter, [[3, 4, 5], [9, 8]], 12, lambda: None)
    stats = decoding.run(policy, recorded)
    assert sum(len(tree.parents) - 1 for tree in recorded.trees) == stats.verify_tokens
    assert all(len(tree.parents) > 1 for tree in recorded.trees)  # a prompt's own forward has no drafts
    tokens = sum(int(tree.accepted.sum()) for tree in recorded.trees)
    seconds = EXAMPLE_COSTS.draft(1) + 2 * EXAMPLE_COSTS.draft(3) + EXAMPLE_COSTS.verify(22)
    rate = predicted_rate(recorded.trees, policy, EXAMPLE_COSTS)
    assert rate == pytest.approx(tokens / seconds / len(recorded.trees))


def test_a_tree_without_drafts(trees):
    class Nothing(TreePolicy):
        max_depth = 1

        def grow(self, drafter, state, root):
            return TokenTree.root_only(root)

    assert predicted_rate(trees, Nothing(), COSTS) == pytest.approx(1 / COSTS.verify(1))
