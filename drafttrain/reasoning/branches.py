"""State of a scheduled run: its sequences (branches) and their texts, the queues between drafting and
verifying, and hooks that run after each piece of work."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from drafttrain.inference.acceptance import AcceptanceRule
from drafttrain.inference.decode import Row
from drafttrain.inference.proposer import NoProposer
from drafttrain.inference.session import Session, Verified
from drafttrain.inference.stats import DecodeStats
from drafttrain.inference.text import OutputText
from drafttrain.reasoning.interface import Answer
from drafttrain.trees.tree import TokenTree

PATIENCE = 300.0  # seconds without a new draft or verification after which a run counts as stuck
POLL = 0.2  # seconds between wake-ups of waiting threads, so that they notice Ctrl-C


class HangingWorker(RuntimeError):
    """Raised where a run waits for a worker thread that makes no progress."""


@dataclass(eq=False)
class Branch:
    """A sequence that is being decoded.

    Attributes:
        row: its request and output.
        session: KV cache and proposer state of this sequence alone; None once it has ended.
        accept: its acceptance rule.
        tree: its latest draft tree; None before the first one and once it has ended.
        verified: the verification that its proposer has not been updated with yet, if any.
        error: why it failed; None if it has not.
        stats: of this sequence alone.
        is_drafted: whether it gets drafts.
    """

    row: Row
    session: Session | None
    accept: AcceptanceRule
    tree: TokenTree | None = None
    verified: Verified | None = None
    error: str | None = None
    stats: DecodeStats = field(default_factory=DecodeStats)

    def __post_init__(self) -> None:
        self.is_drafted = not isinstance(self.session.proposer, NoProposer)

    @property
    def is_going(self) -> bool:
        """Return whether it has neither ended nor failed."""
        return self.row.finish_reason is None and self.error is None

    def free(self) -> None:
        """Release what an ended branch no longer needs: some megabytes, and many prompts may follow."""
        self.session = self.tree = self.verified = None
        self.row.request = replace(self.row.request, prompt_ids=())

    def count(self, step: DecodeStats, emitted: int) -> None:
        """Add a step to the statistics. If a stop text has ended the row within this step, tokens after the
        stop text are removed from the output and not counted.

        Args:
            emitted: tokens that the step emitted, before the row was cut at a stop text.
        """
        row, kept = self.row, len(self.row.tokens)
        if kept < emitted:
            del row.output[kept - emitted :]
            row.step_sizes[-1] = kept
            whole, step = step, DecodeStats()
            step.count_step(kept, min(kept, row.drafted), False, row.verified, whole.tree_depths)
        if row.finish_reason and not step.repeated_tokens + step.fresh_tokens:
            step.count_repetition(row.output, row.step_sizes)
        self.stats += step

    def fail(self, error: BaseException) -> None:
        """Record an error as the reason why the branch ends."""
        self.error = f"{type(error).__name__}: {error}".splitlines()[0]


@dataclass
class AnswerText:
    """The answer to a call, as far as it has been decoded.

    Attributes:
        number: of the call, in the order in which calls were made.
    """

    number: int
    text: OutputText
    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def push(self, row: Row) -> None:
        """Add what a row's last forward emitted. A stop text ends the row and cuts its tokens."""
        piece, row.tokens = self.text.push(row)
        self.pieces.append(piece)
        self.tokens += row.tokens

    def answer(self, branch: Branch) -> Answer:
        """Return the complete answer, given its branch, which has ended."""
        reason, error = branch.row.finish_reason or "", branch.error
        if reason == "not_finite":
            error = "the target's logits are not finite"
        text = "".join(self.pieces) + self.text.flush()  # some is held back where the branch has failed
        return Answer(text, tuple(self.tokens), reason, error, branch.stats)


class Rounds:
    """Thread-safe FIFO queues between drafting and verifying (Algorithm 2's deque Q and label map γ):
    branches wait in `to_draft` for a draft, then in `ready` for its verification.

    Attributes:
        closed: True once the run has ended or failed.
        changes: number of calls of `put`, so that waiting threads notice progress.
    """

    def __init__(self) -> None:
        self.to_draft: deque[Branch] = deque()
        self.ready: deque[Branch] = deque()
        self.closed = False
        self.changes = 0
        self.changed = threading.Condition()

    def close(self) -> None:
        """Wake all waiting threads; from now on `take` returns an empty list."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def put(self, queue: deque[Branch], branches: Sequence[Branch]) -> None:
        """Append branches to one of the two queues."""
        with self.changed:
            queue.extend(branches)
            self.changes += 1
            self.changed.notify_all()

    def take(self, queue: deque[Branch], everything: bool, patience: float = PATIENCE) -> list[Branch]:
        """Remove and return the first branch of a queue, or all; wait for one. Empty once closed.

        Raises:
            HangingWorker: no branch has been queued for `patience` seconds.
        """
        with self.changed:
            waited, seen = 0.0, self.changes
            while not queue and not self.closed:
                self.changed.wait(POLL)
                waited = waited + POLL if seen == self.changes else 0.0
                seen = self.changes
                if waited > patience:
                    raise HangingWorker(f"no draft and no verdict for {patience:g} s: a worker hangs")
            if self.closed:
                return []
            taken = list(queue) if everything else [queue[0]]
            for _ in taken:
                queue.popleft()
            return taken


class Pace:
    """Hooks that run between a piece of work and the use of its result; they do nothing by default. Paced
    runs sleep here to simulate slower devices, and tests control the order of events."""

    def drafted(self, began: float, branches: Sequence[Branch]) -> None:
        """Run after drafting for branches, which began at this time of the timeline's clock."""

    def forwarded(self, began: float, tokens: int, trees: Sequence[TokenTree]) -> None:
        """Run after a target forward over this many prompt tokens and over these trees, before acceptance and
        the drafter's prefill."""
