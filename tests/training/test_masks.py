"""The block mask against a reference that is written from the words of the paper and of its corrections."""

import random

import pytest
import torch

from drafttrain.training.flex import mask_mod
from drafttrain.training.masks import BlockLayout, random_blocks


def starts_of(lengths: list[int], width: int) -> torch.Tensor:
    """document_start [1, width] of documents side by side; padding tokens are documents of their own."""
    starts = []
    for length in lengths:
        starts += [len(starts)] * length
    return torch.tensor([starts + list(range(len(starts), width))])


def blocks_of(layout: BlockLayout, row: int) -> list[list[int]]:
    """The blocks of a row, as lists of positions."""
    blocks: dict[int, list[int]] = {}
    for position, start in enumerate(layout.block_start[row].tolist()):
        blocks.setdefault(start, []).append(position)
    return list(blocks.values())


def brute_force(layout: BlockLayout, row: int) -> list[list[bool]]:
    """Return what each token of a row may attend to, [T][2T], decided position by position."""
    width = layout.block_start.shape[1]
    document = layout.document_start[row].tolist()
    allowed = [[False] * (2 * width) for _ in range(width)]
    for block in blocks_of(layout, row):
        root = block[0]
        for query in block:
            for position in range(width):
                same_document = document[position] == document[query]
                is_verified = position < root  # the root's own state is not known yet
                allowed[query][position] = same_document and is_verified
                allowed[query][width + position] = position in block and position <= query
    return allowed


def drawn(seed: int, low: int = 5, high: int = 10) -> BlockLayout:
    rng = random.Random(seed)
    rows = []
    for _ in range(3):
        lengths, left = [], 60
        while left > 0 and rng.random() < 0.9:
            lengths.append(rng.randrange(1, min(left, 25) + 1))
            left -= lengths[-1]
        rows.append(starts_of(lengths, 60))
    return random_blocks(torch.cat(rows), low, high, torch.Generator().manual_seed(seed))


def dense_mask(layout: BlockLayout) -> torch.Tensor:
    """The layout's mask [B, 1, T, 2T]."""
    batch, t = layout.block_start.shape
    b, q, kv = torch.meshgrid(torch.arange(batch), torch.arange(t), torch.arange(2 * t), indexing="ij")
    return mask_mod(layout)(b, torch.zeros(()), q, kv)[:, None]


@pytest.mark.parametrize("seed", range(8))
def test_the_mask_is_the_reference(seed):
    layout = drawn(seed)
    expected = torch.tensor([brute_force(layout, row) for row in range(3)])
    assert torch.equal(dense_mask(layout), expected[:, None])


def test_worked_example():
    """A document of 5 and one of 2; blocks of 3, the first one cut to 1 by the offset."""
    layout = BlockLayout(starts_of([5, 2], 8), torch.tensor([[0, 1, 1, 1, 4, 5, 5, 7]]))
    lines = ["".join("x" if cell else "." for cell in line) for line in dense_mask(layout)[0, 0].tolist()]
    assert lines == [
        "........x.......",
        "x........x......",
        "x........xx.....",
        "x........xxx....",
        "xxxx........x...",
        ".............x..",
        ".............xx.",
        "...............x",
    ]


def test_a_block_of_ten_trains_the_root_and_nine_drafts():
    layout = random_blocks(starts_of([40], 40), 10, 10, torch.Generator().manual_seed(0))
    whole = [block for block in blocks_of(layout, 0) if len(block) == 10]
    assert len(whole) >= 3


@pytest.mark.parametrize(("low", "high"), [(5, 10), (3, 3), (1, 2)])
def test_lengths_and_offsets(low, high):
    """Whole blocks have lengths within the bounds, cut ones are shorter; lengths and phases all occur."""
    document = starts_of([200], 200).expand(300, -1)
    layout = random_blocks(document, low, high, torch.Generator().manual_seed(0))
    seen = set()
    for row in range(300):
        lengths = [len(block) for block in blocks_of(layout, row)]
        length = lengths[1]
        assert low <= length <= high
        assert set(lengths[1:-1]) == {length} and lengths[0] <= length and lengths[-1] <= length
        seen.add((length, lengths[0]))
    # a first block of k < L comes from offset k, one of L from offset 0
    assert seen == {(length, first) for length in range(low, high + 1) for first in range(1, length + 1)}


def test_phases_are_equally_likely():
    document = starts_of([30], 30).expand(6000, -1)
    layout = random_blocks(document, 6, 6, torch.Generator().manual_seed(0))
    first = (layout.block_start == 0).sum(1)
    counts = torch.bincount(first, minlength=7)[1:]
    assert counts.min() > 850 and counts.max() < 1150  # 1000 expected, standard deviation 29


def test_draws_are_the_generators():
    document = starts_of([100], 100).expand(4, -1)
    one, same, other = (
        random_blocks(document, 5, 10, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(one.block_start, same.block_start)
    assert not torch.equal(one.block_start, other.block_start)
