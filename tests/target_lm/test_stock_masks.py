"""Masks against brute force, and the forms that architectures take."""

import pytest
import torch

from drafttrain.target_lm.masks import causal
from drafttrain.target_lm.stock_masks import allowed_slots, attention_mask
from tests.target_lm.test_cache import LENGTHS, ragged_trees


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("nodes", [range(7), (2, 6), (0,)], ids=["tree", "frontier", "root"])
def test_allowed_slots_by_brute_force(batch, nodes):
    """Of all nodes, as for a target, and of some, as for a drafter."""
    lengths, tree = torch.tensor(LENGTHS[:batch]), ragged_trees()
    ancestors = tree.ancestors()[:batch, list(nodes)]
    allowed = allowed_slots(lengths, ancestors, int(lengths.max()) + tree.width)
    for row in range(batch):
        for i, node in enumerate(nodes):
            path = tree.ancestors()[row, node].nonzero().flatten().tolist()
            seen = {*range(LENGTHS[row]), *(LENGTHS[row] + i for i in path)}
            assert set(allowed[row, i].nonzero().flatten().tolist()) == seen


def test_rows_may_share_their_ancestors():
    lengths = torch.tensor([2, 0])
    expected = [[[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0]]]
    assert allowed_slots(lengths, causal(2, "cpu"), 5)[:, :, :5].int().tolist() == expected


class Config:
    """The part of a config that `attention_mask` reads."""

    def __init__(self, **values):
        self.__dict__.update(values)


def test_forms_of_masks():
    allowed = torch.ones(1, 2, 4, dtype=torch.bool)
    kv_positions, positions = (
        torch.tensor([[0, 1, 2, 2]]),
        torch.tensor([[2, 2]]),
    )  # two siblings share a position
    one = attention_mask(allowed, kv_positions, positions, Config(), torch.float32)
    assert one.dtype == torch.float32 and one.shape == (1, 1, 2, 4) and not one.any()
    windowed = attention_mask(allowed, kv_positions, positions, Config(sliding_window=2), torch.float32)
    assert windowed[0, 0].tolist() == [[torch.finfo(torch.float32).min, 0, 0, 0]] * 2
    kinds = Config(sliding_window=2, layer_types=["full_attention", "sliding_attention", "full_attention"])
    both = attention_mask(allowed, kv_positions, positions, kinds, torch.bfloat16)
    assert set(both) == {"full_attention", "sliding_attention"}
    assert both["full_attention"].tolist() == [[[[0.0] * 4] * 2]]
    lowest = torch.finfo(torch.bfloat16).min
    assert both["sliding_attention"].tolist() == [[[[lowest, 0, 0, 0]] * 2]]
    assert both["sliding_attention"].dtype == torch.bfloat16
