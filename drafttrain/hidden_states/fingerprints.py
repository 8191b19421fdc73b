"""Hash the tokens and loss masks of a corpus split, to identify the split that a store was made from."""

import hashlib

import numpy
import pyarrow
from datasets import Dataset


def corpus_fingerprint(split: Dataset) -> str:
    """Return a hash of the token ids of a split and the lengths of its documents."""
    digest = hashlib.sha256()
    for batch in split.select_columns("input_ids").with_format("arrow").iter(batch_size=1000):
        column = batch["input_ids"].combine_chunks()
        lengths = column.value_lengths().cast(pyarrow.int64())  # [rows]
        digest.update(numpy.ascontiguousarray(lengths.to_numpy(zero_copy_only=False)))
        ids = column.flatten().cast(pyarrow.int32())  # [tokens]
        digest.update(numpy.ascontiguousarray(ids.to_numpy(zero_copy_only=False)))
    return digest.hexdigest()[:16]


def mask_fingerprint(split: Dataset) -> str:
    """Return a hash of the loss masks of a split."""
    digest = hashlib.sha256()
    for batch in split.select_columns("loss_mask").with_format("arrow").iter(batch_size=1000):
        masks = batch["loss_mask"].combine_chunks().flatten().cast(pyarrow.int8())  # [tokens]
        digest.update(numpy.ascontiguousarray(masks.to_numpy(zero_copy_only=False)))
    return digest.hexdigest()[:16]
