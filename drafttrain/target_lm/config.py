"""Settings of the stage that stores the target's hidden states."""

from dataclasses import dataclass, field
from typing import Literal

from drafttrain.utils.ranges import check_ranges, setting


@dataclass
class CollectConfig:
    """Where the target's hidden states come from (section `hidden_states` of a recipe).

    Attributes:
        mode: "online": the target runs inside each training step. "offline": its states are stored before
            training, which takes disk space but pays when the corpus is seen more than once.
        max_disk_gb: largest size of the stored states (10^9 bytes); more is refused.
        batch_tokens: tokens in one forward of the target, padding included.
        shard_tokens: tokens in one file. A process holds one file in memory, and computes at most one
            again after an interruption.
        max_skipped: share of documents without usable states (NaN) above which collection stops.
        tapped_blocks: blocks whose outputs are stored, to train several kinds of drafters. null: those that
            the drafter reads. Final states are always stored.
        kept_in: folders of answers (`regenerated` of a run) whose states `regenerate.keep_states` kept: for
            documents of the corpus they are used instead of being computed again.
        dtype: dtype of the stored states. "auto": "float32" if target.dtype is that, else "bfloat16".
    """

    mode: Literal["online", "offline"] = "online"
    max_disk_gb: float = setting(50.0, gt=0, metadata={"changes_output": False})
    batch_tokens: int = setting(2048, gt=0, metadata={"changes_output": False})
    shard_tokens: int = setting(65536, gt=0)
    max_skipped: float = setting(0.01, ge=0, le=1, metadata={"changes_output": False})
    tapped_blocks: list[int] | None = None
    kept_in: list[str] = field(default_factory=list, metadata={"changes_output": False})
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"

    def check(self) -> None:
        """Validate the ranges.

        Raises:
            UserError: a value is out of range.
        """
        check_ranges(self, "hidden_states")


def stored_bytes(
    n_tokens: int,
    n_documents: int,
    n_shards: int,
    hidden_size: int,
    n_tapped: int,
    dtype: str = "bfloat16",
) -> int:
    """Return the bytes of a store, without the manifest and the shards' headers (about 400 bytes each)."""
    per_number = 4 if dtype == "float32" else 2
    per_token = 4 + per_number * hidden_size * (n_tapped + 1)  # an int32 and n_tapped + 1 states
    return n_tokens * per_token + 8 * (n_documents + n_shards)
