"""Packed rows hold every document once, with masks of next tokens, and are the same each time."""

import random

import numpy as np
import pytest
import torch
from datasets import Dataset

from drafttrain.hidden_states.store import Document
from drafttrain.training.packing import PackedRows, document_lengths, plan_rows
from drafttrain.utils.errors import UserError


def corpus(lengths: list[int], seed: int = 0) -> Dataset:
    rng = random.Random(seed)
    ids = [[rng.randrange(1, 500) for _ in range(n)] for n in lengths]
    masks = [[rng.randrange(2) for _ in row] for row in ids]
    return Dataset.from_dict({"id": [str(i) for i in range(len(ids))], "input_ids": ids, "loss_mask": masks})


def random_lengths(n: int = 200, top: int = 64) -> list[int]:
    rng = random.Random(1)
    return [rng.randrange(1, top + 1) for _ in range(n)]


def test_every_document_in_one_row_that_holds_it():
    lengths = random_lengths()
    rows = plan_rows(lengths, 64, seed=0)
    assert sorted(document for row in rows for document in row) == list(range(200))
    assert all(sum(lengths[document] for document in row) <= 64 for row in rows)
    assert sum(lengths) / (64 * len(rows)) > 0.96  # little padding


def test_empty_documents_are_left_out():
    rows = plan_rows([5, 0, 7, 0], 10, seed=0)
    assert sorted(document for row in rows for document in row) == [0, 2]
    assert plan_rows([], 10, seed=0) == plan_rows([0], 10, seed=0) == []


def test_plan_depends_on_the_seed_alone():
    lengths = random_lengths()
    assert plan_rows(lengths, 64, seed=3) == plan_rows(lengths, 64, seed=3)
    assert plan_rows(lengths, 64, seed=3) != plan_rows(lengths, 64, seed=4)


def test_lengths_of_selected_documents():
    """A selection of a Dataset keeps the whole table underneath."""
    assert document_lengths(corpus([3, 1, 4, 1, 5]).select([4, 0])) == [5, 3]


def test_rows_hold_the_documents():
    lengths = random_lengths(40, 20)
    data = corpus(lengths)
    packed = PackedRows(data, 24, seed=5)
    assert packed.tokens == sum(lengths)
    seen = 0
    for number, documents in enumerate(packed.rows):
        row = packed[number]
        assert all(value.dtype == torch.int64 for value in row.values())
        at = 0
        for document in documents:
            ids, mask = data[document]["input_ids"], data[document]["loss_mask"]
            for i, token in enumerate(ids):
                assert row["input_ids"][at + i] == token
                assert row["document_start"][at + i] == at
                assert row["positions"][at + i] == i
                next_is_trained = i + 1 < len(ids) and mask[i + 1]
                assert row["loss_mask"][at + i] == int(next_is_trained)
            at += len(ids)
        seen += at
        assert row["n_tokens"] == at
        for position in range(at, 24):  # padding: documents of one token
            assert row["document_start"][position] == position
            assert row["positions"][position] == row["loss_mask"][position] == 0
    assert seen == packed.tokens


class FakeStore:
    """States whose values encode document and position; document 2 was skipped."""

    def __init__(self, lengths: list[int]):
        self.lengths = torch.tensor([0 if i == 2 else n for i, n in enumerate(lengths)])

    def __getitem__(self, index: int) -> Document:
        n = int(self.lengths[index])
        final = (index * 32 + torch.arange(n)).bfloat16()[:, None].expand(n, 4)
        return Document(torch.zeros(n, dtype=torch.long), torch.cat((final, -final), 1), final)


def test_stored_states_are_beside_their_tokens():
    lengths = [7, 3, 9, 5, 4, 6]
    packed = PackedRows(corpus(lengths), 12, seed=0, store=FakeStore(lengths))
    assert packed.tokens == sum(lengths) - 9
    found = set()
    for number, documents in enumerate(packed.rows):
        row = packed[number]
        expected = [document * 32 + i for document in documents for i in range(lengths[document])]
        expected += [0] * (12 - len(expected))
        assert row["final"].shape == (12, 4) and row["tapped"].shape == (12, 8)
        assert row["final"].dtype == torch.bfloat16
        assert row["final"][:, 0].tolist() == expected
        assert row["tapped"][:, -1].tolist() == [-value for value in expected]
        found.update(documents)
    assert found == {0, 1, 3, 4, 5}


def test_documents_longer_than_a_row_are_refused():
    with pytest.raises(UserError, match="training.row_length: must be >= 30, .* got 24"):
        PackedRows(corpus([3, 30, 4]), 24, seed=0)


def test_reading_leaves_the_global_random_state_alone():
    documents = corpus(random_lengths(30, 20))
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    packed = PackedRows(documents, 24, seed=0)
    [packed[i] for i in range(len(packed))]
    assert random.getstate() == before[2]
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
