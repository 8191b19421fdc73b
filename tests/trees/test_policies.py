"""Every growth policy against slow references in plain Python, over drafters with ties and certainties."""

import heapq
import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from drafttrain.trees.c2t import C2tPolicy, Plain
from drafttrain.trees.cape import CapePolicy
from drafttrain.trees.chain import ChainPolicy
from drafttrain.trees.costs import AcceptanceCurve, CostCurve, Costs
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.eagle2 import Eagle2Policy, keep_best
from drafttrain.trees.interface import LARGEST, TreePolicy
from drafttrain.trees.parse import parse_policy
from drafttrain.trees.pct import PctPolicy
from drafttrain.trees.static import StaticPolicy
from drafttrain.trees.timed import MEMORY, SMALL, TimedPolicy
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError
from tests.policies import EVERY_POLICY

VOCABULARY = 8
DRAFT, VERIFY = CostCurve((1, 8), (1.0, 1.4)), CostCurve((1, 8, 16, 64), (20.0, 24.0, 30.0, 80.0))
KINDS = ("soft", "ties", "sure", "uniform")


class TableDrafter(Drafter):
    """The next token depends on that token and its depth; draft token j is target token 100 + j."""

    draft_vocab_size = VOCABULARY

    def __init__(self, kind: str, seed: int):
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(12, 120, VOCABULARY, generator=generator) * 2
        if kind == "ties":
            logits = logits.round()
        if kind == "sure":  # some distributions put everything on one token
            certain = torch.rand(12, 120, 1, generator=generator) < 0.5
            logits = torch.where(certain, logits * 1000, logits)
        if kind == "uniform":
            logits = logits * 0
        self.table = logits.log_softmax(-1)  # [depth, token, D]
        self.expanded: list[tuple[int, int]] = []

    def to_target(self, ids: torch.Tensor) -> torch.Tensor:
        return ids + 100

    def expand(self, state: object, tree: TokenTree, frontier: torch.Tensor) -> torch.Tensor:
        for row, nodes in enumerate(frontier.tolist()):
            self.expanded += [(row, node) for node in nodes]
        return self.table[tree.depths.gather(1, frontier), tree.tokens.gather(1, frontier)]

    def children(self, depth: int, token: int, k: int) -> list[tuple[int, float]]:
        """The k most probable tokens after a node, as the policies rank them."""
        values, ids = self.table[depth, token].topk(k)
        return [(int(i) + 100, float(v)) for i, v in zip(ids, values)]


COSTS = Costs(DRAFT, VERIFY, VERIFY, 0.1, (0.7, 0.5), AcceptanceCurve())
POLICIES: dict[str, TreePolicy] = {text: parse_policy(text, COSTS, Plain("P")) for text in EVERY_POLICY} | {
    "chain": ChainPolicy(4),
    "static": StaticPolicy([(0,), (1,), (0, 0), (0, 2), (1, 1), (0, 2, 0), (0, 2, 1)]),
    "k_config": StaticPolicy.from_k_config((3, 1, 2)),
    "cape": CapePolicy(),
    "eagle2": Eagle2Policy(top_k=4, max_depth=4, total=12),
    "eagle2-all": Eagle2Policy(top_k=3, max_depth=3, total=None),
    "timed": TimedPolicy(DRAFT, VERIFY, rate=0.1, acceptance=(0.7, 0.5), width=3, frontier=4, max_depth=6),
    "pct": PctPolicy(draft_seconds=0.05, verify_seconds=1.0, width=4, max_depth=6),
    "c2t": C2tPolicy(Plain("P"), beta=0.05, top_k=4, layer_k=3, max_depth=5),
    "c2t-naive": C2tPolicy(Plain("p"), beta=0.2, top_k=3, layer_k=None, max_depth=4),
    "c2t-expand": C2tPolicy(Plain("P"), beta=0.05, top_k=4, layer_k=6, max_depth=5, expand=0.3),
}
drafters = st.builds(TableDrafter, st.sampled_from(KINDS), st.integers(0, 1000))
# which of several equals topk takes depends on how many it takes
without_ties = st.builds(TableDrafter, st.sampled_from(("soft", "sure")), st.integers(0, 1000))


def rows_of(tree: TokenTree) -> list[list[tuple[tuple[int, ...], float]]]:
    """Each row's nodes as (tokens on the way from the root, joint log-probability)."""
    rows = []
    for b in range(len(tree.tokens)):
        nodes: list[tuple[tuple[int, ...], float]] = []
        for i in range(int(tree.sizes[b])):
            parent = int(tree.parents[b, i])
            path, joint = nodes[parent] if i else ((), 0.0)
            nodes.append(((*path, int(tree.tokens[b, i])), joint + float(tree.log_probs[b, i])))
        rows.append(nodes)
    return rows


@pytest.mark.parametrize("name", POLICIES)
@hypothesis.given(drafter=drafters, roots=st.lists(st.integers(0, 99), min_size=1, max_size=4))
@hypothesis.settings(max_examples=25)
def test_trees_are_trees(name, drafter, roots):
    """Parents come first, layers follow each other, siblings differ, masks and probabilities are those of the
    path, nothing is deeper than announced, and a row does not depend on the others."""
    policy = POLICIES[name]
    tree = policy.grow(drafter, None, torch.tensor(roots))
    for b, root in enumerate(roots):
        n = int(tree.sizes[b])
        parents, depths = tree.parents[b, :n].tolist(), tree.depths[b, :n].tolist()
        assert parents[0] == -1 and depths[0] == 0 and tree.tokens[b, 0] == root
        assert all(0 <= parent < i for i, parent in enumerate(parents) if i)
        assert all(depths[i] == depths[parent] + 1 for i, parent in enumerate(parents) if i)
        assert depths == sorted(depths) and depths[-1] <= policy.max_depth
        siblings = list(zip(parents, tree.tokens[b, :n].tolist()))
        assert len(set(siblings)) == n
        for i, parent in enumerate(parents):
            above = tree.ancestors()[b, parent] if i else torch.zeros(tree.width, dtype=torch.bool)
            expected = above.clone()
            expected[i] = True
            assert torch.equal(tree.ancestors()[b, i], expected)
            if i:
                token, before = int(tree.tokens[b, i]), int(tree.tokens[b, parent])
                assert tree.log_probs[b, i] == drafter.table[depths[parent], before, token - 100]
        if name.startswith("timed"):  # the rows of a batch share what a forward costs
            continue
        alone = policy.grow(drafter, None, torch.tensor([root]))
        assert rows_of(alone)[0] == rows_of(tree)[b]


@hypothesis.given(drafter=without_ties, root=st.integers(0, 99))
@hypothesis.settings(max_examples=40)
def test_static_takes_the_ranks(drafter, root):
    paths = POLICIES["static"].paths
    tree = POLICIES["static"].grow(drafter, None, torch.tensor([root]))
    expected = []
    for path in paths:
        tokens = [root]
        for depth, rank in enumerate(path):
            tokens.append(drafter.children(depth, tokens[-1], rank + 1)[rank][0])
        expected.append(tuple(tokens))
    assert [tokens for tokens, _ in rows_of(tree)[0][1:]] == expected


def test_static_shapes():
    assert len(StaticPolicy.vanilla().paths) == 363 and StaticPolicy.vanilla().max_depth == 5
    assert len(StaticPolicy.eagle1().paths) == 25 and StaticPolicy.eagle1().max_depth == 5
    assert StaticPolicy.from_k_config((1, 1)).paths == [(0,), (0, 0)]
    assert StaticPolicy([]).grow(TableDrafter("soft", 0), None, torch.tensor([3])).width == 1
    assert StaticPolicy.from_text("0-1-00").paths == [(0,), (1,), (0, 0)]
    with pytest.raises(UserError, match="digits joined by dashes"):
        StaticPolicy.from_text("0-x")
    with pytest.raises(UserError, match="at most 4096 nodes, got"):
        StaticPolicy.from_k_config((10,) * 4)
    with pytest.raises(UserError, match="at most 8 children per node, .* got 9"):
        StaticPolicy.from_k_config((9,)).grow(TableDrafter("soft", 0), None, torch.tensor([3]))
    for bounds, widths in (((0.3,), (7,)), ((0.6, 0.3), (3, 2, 1)), ((0.5,), (2, 0))):
        with pytest.raises(UserError, match="must be"):
            CapePolicy(3, bounds, widths)
    for broken in ([(0, 0)], [()], [(0,), (-1,)]):
        with pytest.raises(UserError, match="without its parent"):
            StaticPolicy(broken)


@hypothesis.given(drafter=without_ties, root=st.integers(0, 99))
@hypothesis.settings(max_examples=40)
def test_cape_is_a_chain_with_side_leaves(drafter, root):
    tree = CapePolicy(max_depth=4).grow(drafter, None, torch.tensor([root]))
    expected, path = [], (root,)
    for depth in range(4):
        best = math.exp(drafter.children(depth, path[-1], 1)[0][1])
        width = 7 if best <= 0.3 else 5 if best <= 0.6 else 3 if best <= 0.8 else 1
        children = [(*path, token) for token, _ in drafter.children(depth, path[-1], width)]
        expected += children
        path = children[0]
    assert [tokens for tokens, _ in rows_of(tree)[0][1:]] == expected


def eagle2_reference(drafter: TableDrafter, root: int, top_k: int, depth: int) -> list:
    """All nodes before the rerank as (joint, position, path), breadth first."""
    layer, every = [(0.0, 0, (root,))], []
    for d in range(depth):
        grown = []
        for joint, _, path in sorted(layer, key=lambda node: node[1]):
            for token, log_prob in drafter.children(d, path[-1], top_k):
                fp32 = (torch.tensor(joint) + torch.tensor(log_prob)).item()
                grown.append((fp32, len(every) + len(grown) + 1, (*path, token)))
        every += grown
        layer = heapq.nlargest(top_k, grown, key=lambda node: node[0])
    return every


@hypothesis.given(drafter=without_ties, root=st.integers(0, 99))
@hypothesis.settings(max_examples=40)
def test_eagle2_is_the_reference(drafter, root):
    """Ties would leave the order of expansion open, so there are none here."""
    every = eagle2_reference(drafter, root, 4, 3)
    joints = [joint for joint, _, _ in every]
    hypothesis.assume(len(set(joints)) == len(joints))
    whole = Eagle2Policy(4, 3, None).grow(drafter, None, torch.tensor([root]))
    assert [tokens for tokens, _ in rows_of(whole)[0][1:]] == [path for _, _, path in every]
    best = sorted(heapq.nlargest(10, every), key=lambda node: node[1])
    tree = Eagle2Policy(4, 3, 10).grow(drafter, None, torch.tensor([root]))
    assert [tokens for tokens, _ in rows_of(tree)[0][1:]] == [path for _, _, path in best]


@hypothesis.given(drafter=drafters, roots=st.lists(st.integers(0, 99), min_size=1, max_size=3))
@hypothesis.settings(max_examples=40)
def test_eagle2_keeps_its_budget(drafter, roots):
    tree = Eagle2Policy(top_k=4, max_depth=4, total=12).grow(drafter, None, torch.tensor(roots))
    assert tree.sizes.tolist() == [13] * len(roots)


@hypothesis.given(
    drafter=drafters, roots=st.lists(st.integers(0, 99), min_size=1, max_size=3), ratio=st.floats(0.02, 0.9)
)
@hypothesis.settings(max_examples=60)
def test_pct_expands_and_keeps_by_confidence(drafter, roots, ratio):
    """Against a recursion over all nodes."""
    policy = PctPolicy(ratio, 1.0, width=3, max_depth=5, min_confidence=0.05)
    assert PctPolicy(0.1, 1.0, threshold=ratio).ratio == policy.ratio
    tree = policy.grow(drafter, None, torch.tensor(roots))

    def nodes(path: tuple[int, ...], joint: torch.Tensor) -> dict[tuple[int, ...], float]:
        if joint.exp() < policy.min_confidence:
            return {}
        found = {path: joint.exp().item()}
        if joint.exp() >= policy.ratio and len(path) - 1 < policy.max_depth:
            for token, log_prob in drafter.children(len(path) - 1, path[-1], policy.width):
                found |= nodes((*path, token), joint + torch.tensor(log_prob))
        return found

    for b, root in enumerate(roots):
        expected = nodes((root,), torch.tensor(0.0))
        assert {tokens for tokens, _ in rows_of(tree)[b]} == set(expected)
        parents = {tokens[:-1] for tokens in expected if len(tokens) > 1}
        assert all(expected[path] >= policy.ratio - 1e-6 for path in parents)
        assert min(expected.values()) >= policy.min_confidence


def test_pct_grows_no_more_nodes_than_a_tree_may_have():
    """The best of those that pay."""
    for roots in ([5], [5, 7]):
        policy = PctPolicy(threshold=1e-30, width=16, max_depth=6, min_confidence=0.0)
        tree = policy.grow(TableDrafter("soft", 0), None, torch.tensor(roots))
        assert LARGEST / 2 < tree.width <= LARGEST
        for row, joint in enumerate(tree.joint_log_probs()):  # [n]
            expanded = torch.zeros_like(tree.valid[row])
            expanded[tree.parents[row, tree.valid[row]][1:]] = True
            for depth in range(int(tree.depths[row].max())):
                layer = (tree.depths[row] == depth) & tree.valid[row]
                if (layer & expanded).any() and (layer & ~expanded).any():  # the capped layer
                    assert joint[layer & expanded].min() >= joint[layer & ~expanded].max()


@pytest.mark.parametrize("roots", [[5], [5, 7]])
def test_timed_and_c2t_grow_no_more_nodes_than_a_tree_may_have(roots):
    """Where every node is worth its time, or confident enough."""
    drafter = TableDrafter("uniform", 0)
    for policy in (
        TimedPolicy(DRAFT, VERIFY, 1e-12, width=8, frontier=128, max_depth=7),
        C2tPolicy(Plain("P"), beta=1e-12, top_k=8, layer_k=None, max_depth=4),
    ):
        tree = policy.grow(drafter, None, torch.tensor(roots))
        assert LARGEST / 2 < tree.width <= LARGEST


def test_pct_drafts_one_layer_at_least_and_refuses_a_slow_drafter():
    drafter = TableDrafter("uniform", 0)
    tree = PctPolicy(0.9, 1.0, width=2).grow(drafter, None, torch.tensor([5]))
    assert tree.sizes.tolist() == [3]
    for draft, verify, reason in (
        (1.0, 0.5, "drafting pays only where"),
        (0.0, 1.0, "draft_seconds: must be > 0, got 0.0"),
        (float("nan"), 1.0, "draft_seconds: must be > 0 and < inf, got nan"),
    ):
        with pytest.raises(UserError, match=reason):
            PctPolicy(draft, verify)
    assert PctPolicy(1.0, 0.5, threshold=0.2).ratio == PctPolicy(threshold=0.2).ratio == 0.2
    for threshold in (0.0, 1.5, float("nan")):
        with pytest.raises(UserError, match="threshold: must be > 0 and <= 1, got"):
            PctPolicy(threshold=threshold)


def rooted_subtrees(parents: list[int]) -> list[tuple[int, ...]]:
    """All sets of nodes that hold the root and the parent of each of their nodes."""
    found = [(0,)]
    for node in range(1, len(parents)):
        found += [(*nodes, node) for nodes in found if parents[node] in nodes]
    return found


@hypothesis.given(drafter=drafters, root=st.integers(0, 99), rate=st.floats(0.02, 0.5))
@hypothesis.settings(max_examples=30)
def test_timed_verifies_the_best_of_all_subtrees(drafter, root, rate):
    """Of what it grew, nothing that could be verified is expected to gain more."""
    policy = TimedPolicy(DRAFT, VERIFY, rate, width=2, frontier=2, max_depth=3)
    whole = Eagle2Policy(2, 3, None).grow(drafter, None, torch.tensor([root]))
    joint = whole.joint_log_probs().exp()
    kept = policy._worth_verifying(whole, joint.tolist())
    gain = float(kept.joint_log_probs().exp().sum()) - rate * VERIFY(kept.width)
    best = max(
        float(joint[0, list(nodes)].sum()) - rate * VERIFY(len(nodes))
        for nodes in rooted_subtrees(whole.parents[0].tolist())
    )
    assert gain == pytest.approx(best, abs=1e-5)


@pytest.mark.parametrize("confidence", [[0.9], [0.5, 0.2, 0.1], [0.05], [0.3, 0.3, 0.3, 0.3, 0.01]])
def test_timed_expands_while_it_pays(confidence):
    policy = TimedPolicy(DRAFT, VERIFY, rate=0.1, acceptance=(0.7, 0.5))
    further = max(0.0, confidence[0] * 0.5 * 0.5 - 0.1 * DRAFT(1))  # what the next layer may bring
    gains = {0: 0.0}
    for f in range(1, len(confidence) + 1):
        seconds = DRAFT(f) + VERIFY(f + 2) - VERIFY(2)
        gains[f] = further + 0.5 * sum(confidence[:f]) - 0.1 * seconds
    expected = max(gains, key=gains.get)
    assert policy._worth_expanding(confidence, depth=1, batch=1) == expected


def test_the_rate_of_timed_follows_what_is_reached():
    """From any beginning, with any batch; a step that was interrupted hardly counts."""
    drafter, root = TableDrafter("soft", 1), torch.tensor([5])
    for begun in (0.01, 0.1, 1.0):
        policy = TimedPolicy(DRAFT, VERIFY, begun, follow=1.0)
        assert policy._rate(1) == pytest.approx(begun)
        for batch in (
            1,
            1,
            3,
        ):  # each gives a sequence two tokens in 20 times what verifying a small tree takes
            for _ in range(5 * MEMORY):
                policy.note_step(batch, 2 * batch, 20 * VERIFY(SMALL * batch))
        reached = 2 / (20 * VERIFY(SMALL))
        assert policy._rate(1) == pytest.approx(reached, rel=0.02)
        assert policy._rate(3) == pytest.approx(3 * reached * VERIFY(SMALL) / VERIFY(3 * SMALL), rel=0.02)
        grown = policy.grow(drafter, None, root)
        fixed = TimedPolicy(DRAFT, VERIFY, policy._rate(1), follow=0.0)
        assert torch.equal(grown.tokens, fixed.grow(drafter, None, root).tokens)
        policy.note_step(1, 2, 3600.0)
        assert policy._rate(1) > 0.9 * reached
        fixed.note_step(1, 200, 1.0)
        assert fixed._rate(1) == fixed.rate
    stricter = TimedPolicy(DRAFT, VERIFY, 0.1, follow=1.5)
    assert stricter._rate(1) == pytest.approx(0.1)
    for _ in range(5 * MEMORY):
        stricter.note_step(1, 2, 20 * VERIFY(SMALL))
    assert stricter._rate(1) == pytest.approx(1.5 * reached, rel=0.02)


def test_timed_trusts_what_was_kept():
    drafter = TableDrafter("soft", 1)
    promises = [AcceptanceCurve(accepted=(0.0, share)) for share in (1.0, 0.5, 0.1)]
    policies = [TimedPolicy(DRAFT, VERIFY, 0.1, promise=promise) for promise in promises]
    sizes = [int(policy.grow(drafter, None, torch.tensor([5])).sizes[0]) for policy in policies]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[2]


def test_timed_grows_with_confidence_and_shrinks_with_the_rate():
    drafter = TableDrafter("soft", 1)
    sizes = [
        int(TimedPolicy(DRAFT, VERIFY, rate).grow(drafter, None, torch.tensor([5])).sizes[0])
        for rate in (0.001, 0.05, 0.2, 10.0)
    ]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] > sizes[2] and sizes[3] == 1
    for rate, acceptance in ((0.0, (0.5,)), (1.0, (0.0,)), (1.0, (1.5,))):
        with pytest.raises(UserError, match="(rate|acceptance): must be > 0"):
            TimedPolicy(DRAFT, VERIFY, rate, acceptance)


@pytest.mark.parametrize("promise", [None, AcceptanceCurve((-9.0, 0.0), (0.0, 0.9))])
@pytest.mark.parametrize("nan", [0.05, 1.0])
def test_nan_of_a_drafter_ends_in_trees(nan, promise):
    """Whose root is the first node, with each node's parent among them: the text stays exact."""
    for seed in range(20):
        drafter = TableDrafter("soft", seed)
        drafter.table[torch.rand(drafter.table.shape) < nan] = torch.nan
        timed = TimedPolicy(DRAFT, VERIFY, 0.02, promise=promise)
        for policy in (timed, Eagle2Policy(4, 4, 9)):
            tree = policy.grow(drafter, None, torch.tensor([42, 7]))
            assert tree.tokens[:, 0].tolist() == [42, 7] and tree.parents[:, 0].tolist() == [-1, -1]
            above = tree.depths.gather(1, tree.parents.clamp(min=0)) + 1
            assert torch.equal(above[:, 1:][tree.valid[:, 1:]], tree.depths[:, 1:][tree.valid[:, 1:]])


def test_the_best_of_ragged_trees():
    tree = TokenTree.root_only(torch.tensor([1, 2]))
    layer = torch.zeros(2, 4, dtype=torch.long), torch.tensor([[5, 6, 7, 8]] * 2)
    log_probs = torch.tensor([[-1.0, -2.0, -0.5, -3.0]] * 2)
    best = keep_best(tree.append(*layer, log_probs, counts=torch.tensor([4, 1])), 2)
    assert best.sizes.tolist() == [3, 2]
    assert best.tokens.tolist() == [[1, 5, 7], [2, 5, 0]]
