"""Greedy acceptance against a walk down the tree."""

import random

import pytest
import torch

from drafttrain.inference.acceptance import accept_greedy
from drafttrain.kernels import trees
from drafttrain.trees.tree import TokenTree

VOCABULARY = 3  # so small that siblings often repeat each other and drafts are often right


def random_tree(rng: random.Random, batch: int) -> TokenTree:
    tree = TokenTree.root_only(torch.tensor([rng.randrange(VOCABULARY) for _ in range(batch)]))
    last = [[0]] * batch
    for _ in range(4):
        counts = [rng.randrange(5) if layer else 0 for layer in last]
        width = max(1, *counts)
        parents = torch.tensor([[rng.choice(layer or [0]) for _ in range(width)] for layer in last])
        tokens = torch.tensor([[rng.randrange(VOCABULARY) for _ in range(width)] for _ in range(batch)])
        last = [list(range(size, size + count)) for size, count in zip(tree.sizes.tolist(), counts)]
        tree = tree.append(parents, tokens, torch.zeros(batch, width), counts=torch.tensor(counts))
    return tree


def longest_match(tree: TokenTree, row: int, says: list[int], node: int = 0) -> list[int]:
    """The first of the longest paths from a node on whose tokens are the target's."""
    nodes = range(1, int(tree.sizes[row]))
    children = [i for i in nodes if tree.parents[row, i] == node and tree.tokens[row, i] == says[node]]
    return max(
        ([node, *longest_match(tree, row, says, child)] for child in children), key=len, default=[node]
    )


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_against_a_walk_down_the_tree(seed, native, monkeypatch):
    if not native:
        monkeypatch.setattr(trees, "is_native", lambda like: False)
    rng = random.Random(seed)
    batch = rng.randrange(1, 5)
    tree = random_tree(rng, batch)
    logits = torch.randn(batch, tree.width, VOCABULARY)
    accepted = accept_greedy(tree, logits)
    assert accepted.path.shape[1] == accepted.counts.max()
    for row in range(batch):
        says = logits[row].argmax(-1).tolist()
        path = longest_match(tree, row, says)
        count = int(accepted.counts[row])
        found = accepted.path[row, :count].tolist()
        assert count == len(path)
        # two siblings with the same token: either path is right, if the target predicts the same along it
        assert tree.tokens[row, found].tolist() == tree.tokens[row, path].tolist()
        assert tree.parents[row, found].tolist() == [-1, *found[:-1]]
        assert accepted.next_token[row] == says[found[-1]]
        assert len(set(accepted.path[row].tolist())) == accepted.path.shape[1]  # padding is other nodes
        assert accepted.path[row].max() < tree.width


def test_the_path_of_a_chain_needs_no_gathering():
    """Padding continues the path, so that `TreeCache.commit` sees slots that are already in place."""
    zeros = torch.zeros(2, 3, dtype=torch.long)
    tree = TokenTree.root_only(torch.tensor([1, 1]))
    for i in range(3):
        tree = tree.append(zeros[:, :1] + i, zeros[:, :1] + 1, zeros[:, :1].float())
    logits = torch.zeros(2, 4, VOCABULARY)
    logits[0, :, 1] = 1.0  # accepts everything
    logits[1, 0, 1] = logits[1, 1:, 2] = 1.0  # accepts one draft
    accepted = accept_greedy(tree, logits)
    assert accepted.path.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    assert accepted.counts.tolist() == [4, 2] and accepted.next_token.tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_smallest_of_equal_tokens_wins(dtype):
    """As torch.argmax does in plain decoding; bf16 logits are often equal."""
    logits = torch.zeros(1, 1, 50000, dtype=dtype)
    logits[0, 0, [49999, 31, 40000]] = 7.0
    assert accept_greedy(TokenTree.root_only(torch.tensor([4])), logits).next_token.tolist() == [31]
