"""The dynamic tree against a slow one of lists, through random updates, hits and misses."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.pipeline.prediction import PredictionTree
from drafttrain.trees.drafter import Drafter

VOCABULARY = 16


class Table(Drafter):
    """The next token depends on the token before it alone."""

    draft_vocab_size = VOCABULARY

    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.table = (2 * torch.randn(VOCABULARY, VOCABULARY, generator=generator)).log_softmax(-1)
        self.pruned = []

    def expand(self, state, tree, frontier):
        return self.table[tree.tokens.gather(1, frontier)]

    def prune(self, state, root, tapped, keep):
        self.pruned.append((int(root), keep.tolist()))

    def to_target(self, ids):
        return ids


class Slow:
    """A tree as a list of nodes (token, parent, joint log-probability, depth), by the paper's words."""

    def __init__(self, table, root, width, children):
        self.table, self.width, self.children = table, width, children
        self.nodes, self.taken = [(root, None, 0.0, 0)], 1

    def deepest(self):
        depth = max(node[3] for node in self.nodes)
        return depth, [i for i, node in enumerate(self.nodes) if node[3] == depth]

    def grow(self):
        depth, layer = self.deepest()
        candidates = []
        for place in layer:
            token, _, joint, _ = self.nodes[place]
            values, ids = self.table[token].topk(self.children)
            candidates += [(joint + float(v), place, int(i)) for v, i in zip(values, ids)]
        best = sorted(range(len(candidates)), key=lambda i: -candidates[i][0])[: self.width]
        for i in sorted(best):
            joint, place, token = candidates[i]
            self.nodes.append((token, place, joint, depth + 1))

    def advance(self, token):
        hit = next((i for i, node in enumerate(self.nodes) if node[1] == 0 and node[0] == token), None)
        if hit is None:
            self.nodes, self.taken = [(token, None, 0.0, 0)], 0
            return False
        kept = [hit]
        for i, node in enumerate(self.nodes):
            if node[1] in kept:
                kept.append(i)
        base, self.taken = self.nodes[hit][2], sum(i < self.taken for i in kept)
        new = {old: i for i, old in enumerate(kept)}
        self.nodes = [
            (self.nodes[i][0], new.get(self.nodes[i][1]), self.nodes[i][2] - base, self.nodes[i][3] - 1)
            for i in kept
        ]
        return True


@given(
    seed=st.integers(0, 1000),
    width=st.integers(1, 6),
    children=st.integers(1, 5),
    moves=st.lists(
        st.sampled_from(["grow", "grow", "ahead", "hit", "miss", "random"]), min_size=1, max_size=25
    ),
    data=st.data(),
)
def test_against_a_list_of_nodes(seed, width, children, moves, data):
    drafter = Table(seed)
    tree, slow = PredictionTree(drafter, None, 3, width, children), Slow(drafter.table, 3, width, children)
    assert tree.take().parents.tolist() == [-1]
    for move in moves:
        tree.expand()
        if move == "ahead":  # a layer that is taken with the next one
            assert tree.grow(99)
            slow.grow()
            continue
        if move != "grow":
            first = [node[0] for node in slow.nodes if node[1] == 0]
            missing = [token for token in range(VOCABULARY) if token not in first]
            pool = {"hit": first or missing, "miss": missing, "random": list(range(VOCABULARY))}[move]
            token = data.draw(st.sampled_from(pool))
            assert tree.advance(token, torch.zeros(1, 0)) == slow.advance(token)
        before = slow.taken
        if tree.grow(99):
            slow.grow()
        taken = tree.take()
        if taken is None:  # the root, which has been taken, could not be expanded
            assert before == len(slow.nodes) == 1
            continue
        assert taken.tokens.tolist() == [node[0] for node in slow.nodes[before:]]
        above = [-1 if node[1] is None else node[1] for node in slow.nodes[before:]]
        assert taken.parents.tolist() == above
        slow.taken = len(slow.nodes)
        assert max(tree.tree.depths[0].bincount().tolist()) <= width
        check(tree, slow)


def check(tree, slow):
    found, nodes = tree.tree, slow.nodes
    assert found.tokens[0].tolist() == [node[0] for node in nodes]
    assert found.parents[0].tolist() == [-1 if node[1] is None else node[1] for node in nodes]
    assert found.depths[0].tolist() == [node[3] for node in nodes] == sorted(node[3] for node in nodes)
    for i, joint in enumerate(found.joint_log_probs()[0].tolist()):
        assert math.isclose(joint, nodes[i][2], abs_tol=1e-4)
    ancestors = found.ancestors()[0]
    for i in range(len(nodes)):
        path, above = {i}, nodes[i][1]
        while above is not None:
            path, above = path | {above}, nodes[above][1]
        assert ancestors[i].nonzero()[:, 0].tolist() == sorted(path)
