"""Identity of a target, to check that what one target made is used only with the same target."""

from collections.abc import Sequence
from dataclasses import dataclass

from drafttrain.target_lm.model import FrozenTarget, block_number


@dataclass
class TargetInfo:
    """Identity of a target: it must be the same for the target that made a store and the one that uses it.

    Attributes:
        architecture: class of the model.
        hidden_size, n_blocks, vocab_size: its sizes.
        tapped_blocks: blocks, numbered from 0, whose outputs are stored, concatenated in this order.
        weights: fingerprint of the weights and of the config values that decide a forward.
        tokenizer: hash of the tokenizer; "none" for a target without one.
    """

    architecture: str
    hidden_size: int
    n_blocks: int
    vocab_size: int
    tapped_blocks: list[int]
    weights: str
    tokenizer: str


def target_info(target: FrozenTarget, tapped_blocks: Sequence[int] | None = None) -> TargetInfo:
    """Return the identity of a target with its tapped blocks, or with others (negative: from the end)."""
    blocks = target.tapped_blocks if tapped_blocks is None else tapped_blocks
    return TargetInfo(
        architecture=type(target.model).__name__,
        hidden_size=target.hidden_size,
        n_blocks=target.n_blocks,
        vocab_size=target.vocab_size,
        tapped_blocks=[block_number(block, target.n_blocks) for block in blocks],
        weights=target.fingerprint,
        tokenizer=target.tokenizer_hash or "none",
    )
