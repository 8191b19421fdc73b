"""Settings of the n-gram cache that Self-Draft takes from a corpus."""

from dataclasses import dataclass, field

from drafttrain.data.config import Source
from drafttrain.utils.errors import UserError
from drafttrain.utils.ranges import check_ranges, setting


@dataclass
class NgramConfig:
    """How a corpus cache is built.

    Attributes:
        sources: texts to count, in this order; of chats the assistant turns. Equal texts are counted once.
        exclude: files of evaluation prompts; texts that contain one are left out.
        gram: tokens of the longest n-gram.
        min_count: occurrences below which an n-gram is dropped.
        top: candidates that a look-up returns at most.
        held_out: share of the texts that is left out, to measure how often the cache is right.
        processes: number of processes that encode and count; does not change the result.
        memory: GB that counting may take, all processes together; does not change the result.
    """

    sources: list[Source] = field(default_factory=list)
    exclude: list[str] = field(default_factory=list)
    gram: int = setting(5, ge=2, le=16)
    min_count: int = setting(2, ge=1)
    top: int = setting(16, ge=1)
    held_out: float = setting(0.02, ge=0, lt=1)
    processes: int = setting(2, ge=1, le=1024, metadata={"changes_output": False})
    memory: float = setting(1.0, gt=0, metadata={"changes_output": False})

    def check(self) -> None:
        """Validate the settings.

        Raises:
            UserError: no source, or a value out of range.
        """
        if not self.sources:
            raise UserError("SOURCE: must name at least one file, folder or archive of text, got none")
        check_ranges(self)
