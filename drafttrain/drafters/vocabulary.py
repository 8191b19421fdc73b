"""The draft vocabulary: the target tokens that a drafter can propose."""

from collections.abc import Iterable

import numpy as np
import torch

from drafttrain.utils.errors import UserError

_KEYS = "change drafter.draft_vocab_size (training.init_draft_vocab_size to extend a drafter's vocabulary)"


def count_trained_tokens(corpus, vocab_size: int) -> np.ndarray:
    """Return how often each target token is a trained token of the corpus, int64 [V].

    Args:
        corpus: a `datasets.Dataset` with `input_ids` and `loss_mask`.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for batch in corpus.with_format("arrow").iter(batch_size=4096):
        ids = batch.column("input_ids").combine_chunks().flatten().to_numpy(zero_copy_only=False)
        mask = batch.column("loss_mask").combine_chunks().flatten().to_numpy(zero_copy_only=False)
        counts += np.bincount(ids[mask > 0], minlength=vocab_size)[:vocab_size]
    return counts


def draft_vocabulary(counts: np.ndarray, size: int, always: Iterable[int]) -> torch.Tensor:
    """Return the most frequent trained tokens, ascending by target id; ties go to the smaller id.

    Args:
        counts: trained occurrences of each target token [V].
        size: tokens to keep.
        always: tokens kept regardless of their count (the stop tokens, or the vocabulary to be extended).

    Returns:
        target ids [D].

    Raises:
        UserError: `size` is not in 1 … V, or smaller than `always`.
    """
    vocab_size, always = len(counts), set(always)
    if size == vocab_size:
        return torch.arange(vocab_size)
    if not 0 < size <= vocab_size:
        raise UserError(f"draft vocabulary: must be 1 to {vocab_size} tokens, got {size}; {_KEYS}")
    if size < len(always):
        raise UserError(
            f"draft vocabulary: must be >= {len(always)} tokens, which are always in it, got {size}; {_KEYS}"
        )
    ranked = np.lexsort((np.arange(vocab_size), -counts))  # by count, then by id
    others = [token for token in ranked.tolist() if token not in always]
    return torch.tensor(sorted([*always, *others[: size - len(always)]]))
