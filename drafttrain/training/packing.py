"""Pack documents into rows of one length, so that a step wastes little computation on padding.

The plan depends only on the documents' lengths and a seed, so online and offline training see the same rows,
and so does a resumed run.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import datasets
import numpy as np
import torch
from torch.utils.data import Dataset

from drafttrain.utils.errors import UserError

if TYPE_CHECKING:
    from drafttrain.hidden_states.store import HiddenStateStore


def document_lengths(corpus: datasets.Dataset) -> list[int]:
    """Return the number of tokens of each document of a corpus split."""
    lengths: list[int] = []
    for batch in corpus.select_columns("input_ids").with_format("arrow").iter(batch_size=4096):
        lengths += batch["input_ids"].combine_chunks().value_lengths().to_pylist()
    return lengths


def plan_rows(lengths: Sequence[int], row_length: int, seed: int) -> list[list[int]]:
    """Pack documents into rows, each into the fullest row that still holds it, long documents first.

    Documents of one length come in an order that depends on the seed.

    Args:
        lengths: tokens of each document, none above `row_length`.

    Returns:
        the documents of each row; every document with tokens in exactly one row.
    """
    rows: list[list[int]] = []
    open_rows: dict[int, list[int]] = {}  # free space -> rows
    order = np.random.default_rng(seed).permutation(len(lengths)).tolist()
    for document in sorted(order, key=lambda document: -lengths[document]):
        length = lengths[document]
        if length == 0:
            continue
        space = next((s for s in range(length, row_length + 1) if open_rows.get(s)), None)
        if space is None:
            rows.append([])
            index, space = len(rows) - 1, row_length
        else:
            index = open_rows[space].pop()
        rows[index].append(document)
        open_rows.setdefault(space - length, []).append(index)
    return rows


class PackedRows(Dataset):
    """Rows of packed documents as tensors.

    An item holds `input_ids`, `loss_mask`, `document_start`, `positions` (all int64 [T]), `n_tokens`
    (int64 []) and, from a store, `tapped` [T, K·H] and `final` [T, H]. `loss_mask[t]` is for input t: 1 where
    the *next* token of the same document is trained. Padding at a row's end belongs to documents of one token
    each and is never trained.

    Attributes:
        rows: documents of each row.
        tokens: in all of them, without padding.
        longest: tokens of the longest document.
    """

    def __init__(
        self, corpus: datasets.Dataset, row_length: int, seed: int, store: "HiddenStateStore | None" = None
    ):
        self.corpus, self.row_length, self.store = corpus.with_format("numpy"), row_length, store
        lengths = document_lengths(corpus)
        self.longest = max(lengths, default=0)
        if self.longest > row_length:
            raise UserError(
                f"training.row_length: must be >= {self.longest}, the corpus's longest document, got "
                f"{row_length}; raise it or build the corpus with a smaller max_length"
            )
        if store is not None:  # a document whose states were not finite is stored empty
            lengths = store.lengths.tolist()
        self.rows = plan_rows(lengths, row_length, seed)
        self.tokens = sum(lengths)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        t = self.row_length
        row = {
            "input_ids": torch.zeros(t, dtype=torch.long),
            "loss_mask": torch.zeros(t, dtype=torch.long),
            "document_start": torch.arange(t),
            "positions": torch.zeros(t, dtype=torch.long),
        }
        states: dict[str, list[torch.Tensor]] = {"tapped": [], "final": []}
        at = 0
        for number in self.rows[index]:
            document = self.corpus[number]
            end = at + len(document["input_ids"])
            row["input_ids"][at:end] = torch.from_numpy(document["input_ids"].astype(np.int64))
            trained = torch.from_numpy(document["loss_mask"].astype(np.int64))
            row["loss_mask"][at : end - 1] = trained[1:]
            row["document_start"][at:end] = at
            row["positions"][at:end] = torch.arange(end - at)
            if self.store is not None:
                stored = self.store[number]
                states["tapped"].append(stored.tapped)
                states["final"].append(stored.final)
            at = end
        for name, parts in states.items():
            if parts:
                row[name] = torch.cat([*parts, parts[0].new_zeros(t - at, parts[0].shape[1])])  # [T, …]
        row["n_tokens"] = torch.tensor(at)
        return row
