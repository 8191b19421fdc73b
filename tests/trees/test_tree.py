"""TokenTree against trees held as plain lists, over random ragged batches."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.kernels import trees as kernels
from drafttrain.trees.lists import rows_of
from drafttrain.trees.tree import TokenTree


@pytest.fixture(params=[True, False], ids=["native", "torch"], scope="module", autouse=True)
def ways(request):
    """Run each test by native calls, as on a CPU with a compiler, and by torch's operators."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.param:
            patch.setattr(kernels, "is_native", lambda like: False)
        yield


Row = list[tuple[int, float, int]]  # token, log-probability and parent of each node, breadth-first


def random_row(rng: random.Random, layers: int) -> list[Row]:
    """The layers of a random tree; parents are indices into the whole row."""
    row = [[(rng.randrange(100), 0.0, -1)]]
    start, count = 0, 1  # of the deepest layer
    for _ in range(layers):
        size = rng.randrange(4) if count else 0
        row.append([(rng.randrange(100), -rng.random(), start + rng.randrange(count)) for _ in range(size)])
        start, count = start + count, size
    return row


def grow(seed: int, batch: int, layers: int) -> tuple[TokenTree, list[Row]]:
    """A random batch of trees made by `append`, and what its rows should hold."""
    rng = random.Random(seed)
    rows = [random_row(rng, layers) for _ in range(batch)]
    tree = TokenTree.root_only(torch.tensor([row[0][0][0] for row in rows]))
    for depth in range(1, layers + 1):
        new = [row[depth] for row in rows]
        width = max(map(len, new))
        padded = [nodes + [(99, -9.0, 0)] * (width - len(nodes)) for nodes in new]
        tokens, log_probs, parents = (
            torch.tensor([[node[i] for node in nodes] for nodes in padded]) for i in range(3)
        )
        if width:
            counts = torch.tensor([len(nodes) for nodes in new])
            tree = tree.append(parents, tokens, log_probs, -log_probs, counts)
    return tree, [[node for layer in row for node in layer] for row in rows]


def path_to(row: Row, node: int) -> list[int]:
    """Nodes from the root to a node."""
    parent = row[node][2]
    return [*(path_to(row, parent) if parent >= 0 else []), node]


trees = st.builds(grow, st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 5))


def check(tree: TokenTree, rows: list[Row]) -> None:
    """Compares every field and every method with the rows."""
    assert tree.sizes.tolist() == [len(row) for row in rows]
    assert tree.width == max(len(row) for row in rows)
    for b, row in enumerate(rows):
        for i in range(tree.width):
            if i >= len(row):
                padding = (tree.tokens[b, i], tree.parents[b, i], tree.depths[b, i], tree.entropies[b, i])
                assert padding == (0, 0, 0, 0)
                assert tree.log_probs[b, i] == tree.joint_log_probs()[b, i] == -torch.inf
                assert tree.ancestors()[b, i].nonzero().tolist() == [[i]]
                assert not tree.valid[b, i]
                continue
            token, log_prob, parent = row[i]
            path = path_to(row, i)
            assert (tree.tokens[b, i], tree.parents[b, i], tree.depths[b, i]) == (
                token,
                parent,
                len(path) - 1,
            )
            assert tree.log_probs[b, i] == torch.tensor(log_prob)
            assert tree.entropies[b, i] == torch.tensor(-log_prob)
            assert tree.ancestors()[b, i].nonzero().flatten().tolist() == path
            joint = sum(row[node][1] for node in path)
            assert tree.joint_log_probs()[b, i].item() == pytest.approx(joint, abs=1e-5)
            assert tree.valid[b, i]


@given(trees)
def test_append(grown):
    check(*grown)


@given(trees)
def test_ancestors_from_parents_alone(grown):
    tree, _ = grown
    assert torch.equal(replace(tree, _ancestors=None).ancestors(), tree.ancestors())
    assert torch.equal(replace(tree, _joint=None).joint_log_probs(), tree.joint_log_probs())


@given(trees, st.integers(0, 10**6))
def test_select(grown, seed):
    tree, rows = grown
    rng = random.Random(seed)
    marked = [[rng.random() < 0.7 for _ in range(tree.width)] for _ in rows]
    selected = []
    for row, marks in zip(rows, marked):
        kept = [i for i in range(len(row)) if all(node == 0 or marks[node] for node in path_to(row, i))]
        selected.append([(row[i][0], row[i][1], kept.index(row[i][2]) if i else -1) for i in kept])
    check(tree.select(torch.tensor(marked)), selected)
    check(tree, rows)  # a tree is never changed


def test_append_without_counts_follows_ragged_rows():
    tree = TokenTree.root_only(torch.tensor([1, 2]))
    tree = tree.append(torch.zeros(2, 2, dtype=torch.long), torch.tensor([[3, 4], [5, 6]]), torch.zeros(2, 2))
    tree = tree.select(torch.tensor([[True, True, True], [True, False, True]]))
    tree = tree.append(torch.tensor([[2], [1]]), torch.tensor([[7], [8]]), torch.tensor([[-1.0], [-2.0]]))
    assert tree.tokens.tolist() == [[1, 3, 4, 7], [2, 6, 8, 0]]
    assert tree.parents.tolist() == [[-1, 0, 0, 2], [-1, 0, 1, 0]]
    assert tree.sizes.tolist() == [4, 3]
    assert tree.entropies.isnan().tolist() == [[False, True, True, True], [False, True, True, False]]


def test_example_of_the_docstring():
    tree = TokenTree.root_only(torch.tensor([10]))
    tree = tree.append(torch.tensor([[0, 0]]), torch.tensor([[11, 12]]), torch.zeros(1, 2))
    tree = tree.append(torch.tensor([[2]]), torch.tensor([[13]]), torch.zeros(1, 1))
    assert tree.parents.tolist() == [[-1, 0, 0, 2]]
    assert tree.ancestors().int().tolist() == [[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]]


@given(trees, st.integers(0, 10**6))
def test_take_is_select_without_padding(grown, seed):
    rng = random.Random(seed)
    for tree in rows_of(grown[0]):
        wanted = torch.tensor([[rng.random() < 0.7 for _ in range(tree.width)]])
        expected = tree.select(wanted)
        wanted[:, 0] = True
        closed = ~(tree.ancestors() & ~wanted[:, None]).any(-1)  # [1, n]
        taken = tree.take(closed.nonzero()[:, 1][None])
        for name in ("tokens", "parents", "depths", "log_probs", "entropies", "sizes"):
            assert torch.equal(getattr(taken, name), getattr(expected, name)), name
        assert torch.equal(taken.ancestors(), expected.ancestors())
        assert torch.equal(taken.joint_log_probs(), expected.joint_log_probs())
