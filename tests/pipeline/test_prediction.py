"""The dynamic tree against a slow one of lists, through random updates, hits and misses."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.pipeline.best_first import BestFirstTree
from drafttrain.pipeline.prediction import PredictionTree, draft
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


class SlowBestFirst:
    """A tree as a list of nodes (path, timestep of entering), whose candidates are all looked through."""

    def __init__(self, table, root, width, children, groups):
        self.table, self.width, self.children, self.groups, self.now = table, width, children, groups, 0
        self.restart(root)

    def restart(self, root):
        self.nodes, self.expanded = [((root,), self.now + 1)], set()

    def joint(self, path):
        return sum(float(self.table[one, other]) for one, other in zip(path, path[1:]))

    def worth(self, path):
        entered = dict(self.nodes)
        known = max(entered[path[: i + 1]] + self.groups - 1 for i in range(len(path)))
        return self.joint(path) + math.log(min(max(known - self.now, 1), self.groups))

    def end_of_chain(self):
        path, there = self.nodes[0][0], dict(self.nodes)
        while (*path, int(self.table[path[-1]].argmax())) in there:
            path = (*path, int(self.table[path[-1]].argmax()))
        return path

    def expand(self):
        left = [path for path, _ in self.nodes if path not in self.expanded]
        end = self.end_of_chain()
        left.sort(key=lambda path: math.inf if path == end else self.worth(path), reverse=True)
        self.expanded |= {*left[: self.width]}

    def grow(self, max_depth):
        there, found, end = dict(self.nodes), [], self.end_of_chain()
        for place, (path, _) in enumerate(self.nodes):
            if path in self.expanded and len(path) <= max_depth:
                values, ids = self.table[path[-1]].topk(self.children)
                for column, (value, token) in enumerate(zip(values.tolist(), ids.tolist())):
                    worth = math.inf if path == end and not column else self.worth(path) + value
                    if (*path, token) not in there:
                        found.append((worth, (place, column), (*path, token)))
        best = sorted(sorted(found, reverse=True)[: self.width], key=lambda one: one[1])
        self.nodes += [(path, self.now + 1) for _, _, path in best]

    def advance(self, token):
        root = self.nodes[0][0]
        if (*root, token) not in dict(self.nodes):
            self.restart(token)
            return False
        keep = [one for one in self.nodes if one[0][: len(root) + 1] == (*root, token)]
        self.nodes = [(path[len(root) :], entered) for path, entered in keep]
        self.expanded = {path[len(root) :] for path in self.expanded if path in dict(keep)}
        return True


@given(
    seed=st.integers(0, 1000),
    width=st.integers(1, 6),
    children=st.integers(1, 5),
    groups=st.integers(1, 6),
    layers=st.integers(1, 3),
    tokens=st.lists(st.lists(st.integers(-1, VOCABULARY - 1), max_size=2), min_size=1, max_size=12),
)
def test_best_first_against_a_list_of_nodes(seed, width, children, groups, layers, tokens):
    """In each timestep some tokens leave; -1 is that of the first child, a hit."""
    drafter, deepest = Table(seed), 8
    tree = BestFirstTree(groups, drafter, None, 3, width, children)
    slow = SlowBestFirst(drafter.table, 3, width, children, groups)
    tree.take()
    slow.now += 1
    for leaving in tokens:
        list(draft(tree, layers, deepest))
        slow.expand()
        for _ in range(layers - 1):
            before = len(slow.nodes)
            slow.grow(deepest)
            if len(slow.nodes) == before:
                break
            slow.expand()
        for token in leaving:
            below = [path[1] for path, _ in slow.nodes if len(path) == 2]
            token = token if token >= 0 or not below else below[0]
            assert tree.advance(max(token, 0), torch.zeros(1, 0)) == slow.advance(max(token, 0))
        tree.grow(deepest)
        slow.grow(deepest)
        tree.take()
        slow.now += 1
        found = tree.tree
        tokens_of = found.tokens[0].tolist()
        paths = [tuple(tokens_of[i] for i in row.nonzero()[:, 0]) for row in found.ancestors()[0]]
        assert [*zip(paths, tree.entered.tolist())] == slow.nodes
        assert {path for path, known in zip(paths, tree._known) if known} == slow.expanded


def test_a_late_sibling_is_a_hit():
    """The first layer has b and c. Of the next ones d is worth more than the grandchildren of b and c, and is
    known before a restart."""
    drafter = Table(0)
    a, b, c, d = 1, 2, 3, 4
    drafter.table = torch.full((VOCABULARY, VOCABULARY), -3.0)
    drafter.table[a, [b, c, d]] = torch.tensor([0.5, 0.3, 0.2]).log()

    def hits(tree):
        tree.take()
        for _ in range(3):  # a is in the stages
            list(draft(tree, 1, 9))
            tree.grow(9)
            tree.take()
        return tree.advance(d, torch.zeros(1, 0))

    assert not hits(PredictionTree(drafter, None, a, 2, 3))
    assert hits(BestFirstTree(4, drafter, None, a, 2, 3))
