"""C2T's trees against a recursion over single nodes, with ties and certainties; chains; features; entropy."""

import math

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from drafttrain.trees.c2t import FEATURES, C2tPolicy, Plain
from drafttrain.trees.eagle2 import expand_best
from drafttrain.trees.expand import top_entropy
from drafttrain.utils.errors import UserError
from tests.trees.test_policies import TableDrafter, drafters, rows_of


class Formula:
    """A confidence that no probability alone gives; in steps of 1/40, so that many nodes tie."""

    features = FEATURES

    def predict(self, x):
        score = (x * np.array([6, -0.2, -0.3, 0.5, -0.2], np.float32)).sum(-1)
        return np.round(40 / (1 + np.exp(-score))) / 40


def reference(drafter: TableDrafter, policy: C2tPolicy, root: int) -> list[tuple[int, ...]]:
    """Algorithm 1, node by node: all paths but the root's, breadth first."""
    layer, every = [((root,), torch.tensor(0.0))], []
    for depth in range(1, policy.max_depth + 1):
        candidates = []
        for path, joint in layer:
            distribution = drafter.table[depth - 1, path[-1]]
            entropy = -sum(math.exp(v) * v for v in distribution.tolist() if v > -700)
            children = drafter.children(depth - 1, path[-1], min(policy.top_k, len(distribution)))
            for rank, (token, log_prob) in enumerate(children):
                total = joint + torch.tensor(log_prob)
                known = {
                    "P": np.exp(total.numpy()),
                    "H": entropy,
                    "d": depth,
                    "p": np.exp(np.float32(log_prob)),
                    "rank": rank,
                }
                features = [known[name] for name in policy.confidence.features]
                sure = float(policy.confidence.predict(np.array(features, np.float32)))
                candidates.append((sure, (*path, token), total))
        if policy.layer_k is not None:  # `sorted` is stable: among equals the earlier one comes first
            best = sorted(range(len(candidates)), key=lambda i: -candidates[i][0])[: policy.layer_k]
            candidates = [candidates[i] for i in sorted(best)]
        kept = [candidate for candidate in candidates if candidate[0] > policy.beta]
        every += [path for _, path, _ in kept]
        layer = [(path, total) for sure, path, total in kept if sure > (policy.expand or policy.beta)]
    return every


policies = st.builds(
    C2tPolicy,
    st.sampled_from([Formula(), Plain("P"), Plain("p")]),
    beta=st.sampled_from([0.013, 0.11, 0.31, 0.525, 0.77]),
    top_k=st.sampled_from([1, 2, 3, 15]),
    layer_k=st.sampled_from([1, 3, 6, 15]),
    max_depth=st.integers(1, 5),
    expand=st.sampled_from([None, None, 0.05, 0.21, 0.43]),
)
naive = st.builds(
    C2tPolicy,
    st.sampled_from([Formula(), Plain("P")]),
    beta=st.sampled_from([0.11, 0.31, 0.525]),
    top_k=st.sampled_from([2, 3]),
    layer_k=st.none(),
    max_depth=st.integers(1, 4),
)


@hypothesis.given(
    drafter=drafters, roots=st.lists(st.integers(0, 99), min_size=1, max_size=4), policy=policies | naive
)
@hypothesis.settings(max_examples=150)
def test_against_the_reference(drafter, roots, policy):
    rows = rows_of(policy.grow(drafter, None, torch.tensor(roots)))
    for row, root in zip(rows, roots):
        assert [path for path, _ in row[1:]] == reference(drafter, policy, root)


@hypothesis.given(drafter=drafters, roots=st.lists(st.integers(0, 99), min_size=1, max_size=4))
@hypothesis.settings(max_examples=30)
def test_chains_stop_early(drafter, roots):
    for policy, joint, threshold in (
        (C2tPolicy.dymax(0.37, 6), False, 0.37),
        (C2tPolicy.dyjoint(0.083, 6), True, 0.083),
    ):
        tree = policy.grow(drafter, None, torch.tensor(roots))
        for row, root in zip(rows_of(tree), roots):
            path, total = (root,), torch.tensor(0.0)
            while len(path) <= 6:
                [(token, log_prob)] = drafter.children(len(path) - 1, path[-1], 1)
                total = total + torch.tensor(log_prob)
                if float((total if joint else torch.tensor(log_prob)).exp()) <= threshold:
                    break
                path = (*path, token)
            assert row[-1][0] == path and len(row) == len(path)


def test_features_are_those_of_the_full_tree():
    """A classifier sees when growing what it was trained on: depth 1 below the root, the
    entropy of the parent's distribution, the product along the path, places among siblings."""
    seen = []

    class Everything:
        features = FEATURES

        def predict(self, x):
            seen.append(torch.from_numpy(x))
            return np.ones(x.shape[:-1], np.float32)

    drafter, root = TableDrafter("soft", 3), torch.tensor([5, 7])
    tree = C2tPolicy(Everything(), 0.5, 3, None, 3).grow(drafter, None, root)
    full = expand_best(drafter, None, root, 27, 3, entropies=True)  # 8 children each
    every = torch.cat([layer.flatten(1, 2) for layer in seen], 1)  # [2, 39, F]
    joined = dict(zip(FEATURES, every.unbind(-1)))  # [2, 39] each
    assert tree.sizes.tolist() == [40, 40]
    torch.testing.assert_close(joined["P"], tree.joint_log_probs()[:, 1:].exp())
    torch.testing.assert_close(joined["p"], tree.log_probs[:, 1:].exp())
    assert torch.equal(joined["d"].long(), tree.depths[:, 1:])
    assert torch.equal(joined["rank"][0].long(), torch.arange(39) % 3)
    assert torch.equal(joined["H"], tree.entropies[:, 1:])
    torch.testing.assert_close(tree.entropies[:, 1], full.entropies[:, 1])
    expected = -(drafter.table[1, tree.tokens[0, 2]].exp() * drafter.table[1, tree.tokens[0, 2]]).sum()
    torch.testing.assert_close(tree.entropies[0, 7], expected)  # the first child of node 2


def test_entropies_are_left_out_where_nobody_asks():
    tree = C2tPolicy(Plain("P"), 0.01, 2, 2, 2).grow(TableDrafter("soft", 3), None, torch.tensor([5]))
    assert tree.width > 1 and tree.entropies[0, 1:].isnan().all()


@pytest.mark.parametrize("size", [3, 1000, 1001, 4000])
def test_entropy_counts_the_top_1000(size):
    torch.manual_seed(0)
    log_probs = (torch.randn(2, 3, size) * 2).log_softmax(-1)
    top = log_probs.sort(descending=True).values[..., :1000]
    torch.testing.assert_close(top_entropy(log_probs), -(top.exp() * top).sum(-1))
    certain = torch.full((1, size), -torch.inf)
    certain[0, 1] = 0.0
    assert top_entropy(certain).tolist() == [0.0]
    assert top_entropy(torch.full((1, size), torch.nan)).isnan().all()


@pytest.mark.parametrize("settings", [{"beta": 0.0}, {"beta": 1.0}, {"top_k": 0}, {"layer_k": 0}])
def test_impossible_settings(settings):
    with pytest.raises(UserError, match="must be >"):
        C2tPolicy(Plain("P"), **settings)
