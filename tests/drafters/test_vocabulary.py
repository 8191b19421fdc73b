"""The draft vocabulary: the most frequent trained tokens, stop tokens always among them."""

import random
from collections import Counter

import numpy as np
import pytest
import torch
from datasets import Dataset

from drafttrain.drafters.edd import EddModel
from drafttrain.drafters.vocabulary import count_trained_tokens, draft_vocabulary
from drafttrain.utils.errors import UserError


def test_counts_trained_tokens_only():
    rng = random.Random(0)
    ids = [[rng.randrange(20) for _ in range(rng.randrange(1, 30))] for _ in range(50)]
    masks = [[rng.randrange(2) for _ in row] for row in ids]
    corpus = Dataset.from_dict({"input_ids": ids, "loss_mask": masks}).select(range(10, 50))
    expected = Counter(i for row, mask in zip(ids[10:], masks[10:]) for i, m in zip(row, mask) if m)
    assert count_trained_tokens(corpus, 25).tolist() == [expected[i] for i in range(25)]


@pytest.mark.parametrize("size", [1, 2, 5, 9, 30])
def test_most_frequent_first_and_ties_to_the_smaller_id(size):
    rng = random.Random(size)
    counts = [rng.randrange(4) for _ in range(30)]  # many ties
    expected = sorted(sorted(range(30), key=lambda i: (-counts[i], i))[:size])
    assert draft_vocabulary(np.array(counts), size, []).tolist() == expected


@pytest.mark.parametrize("always", [{7}, {29, 3}, {0, 1, 2}])
def test_stop_tokens_are_always_in(always):
    counts = np.arange(30)  # token 29 is the most frequent
    kept = draft_vocabulary(counts, 6, always).tolist()
    others = [i for i in range(29, -1, -1) if i not in always][: 6 - len(always)]
    assert kept == sorted([*always, *others])


def test_full_vocabulary():
    counts = np.zeros(12, dtype=int)
    assert draft_vocabulary(counts, 12, [5]).tolist() == list(range(12))


@pytest.mark.parametrize("size", [0, -3, 13])
def test_impossible_sizes(size):
    with pytest.raises(UserError, match=f"must be 1 to 12 tokens, got {size}"):
        draft_vocabulary(np.zeros(12), size, [])


def test_too_small_for_the_stop_tokens():
    with pytest.raises(UserError, match="must be >= 3 tokens, .* got 2"):
        draft_vocabulary(np.zeros(12), 2, [1, 2, 3])


def test_the_map_is_in_the_weights(make_target, make_drafter, tmp_path):
    target = make_target("llama")
    drafter = make_drafter(target)
    drafter.save_pretrained(tmp_path)
    again = EddModel.load(tmp_path, target)
    assert again.to_target(torch.tensor([[0, 1], [255, 7]])).tolist() == [[0, 2], [510, 14]]
