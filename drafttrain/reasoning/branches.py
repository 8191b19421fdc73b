"""The sequences of a scheduled run and their texts, the queue in which they wait, and what their work is
followed by."""

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

PATIENCE = 300.0  # seconds without a draft or a verdict after which a run has got stuck
POLL = 0.2  # seconds: how soon waiting threads notice Ctrl-C


@dataclass(eq=False)
class Branch:
    """A sequence that is being decoded.

    Attributes:
        row: its request and output.
        session: of this sequence alone; None once it has ended.
        accept: its acceptance rule.
        tree: its draft; None while it has none.
        verified: the verdict that its proposer has not had yet.
        error: why it ended, if it could not go on.
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
        return self.row.finish_reason is None and self.error is None

    def free(self) -> None:
        """Let go of what only a branch that goes on needs: some megabytes, and many prompts may follow."""
        self.session = self.tree = self.verified = None
        self.row.request = replace(self.row.request, prompt_ids=())

    def count(self, step: DecodeStats, emitted: int) -> None:
        """Add a step to the statistics. Where a stop text has ended the row within what it emitted, the
        tokens after it never were.

        Args:
            emitted: tokens of the step, before the row was cut.
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
        """End it with the reason."""
        self.error = f"{type(error).__name__}: {error}".splitlines()[0]


@dataclass
class AnswerText:
    """The answer of a call so far.

    Attributes:
        number: of the call.
    """

    number: int
    text: OutputText
    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def push(self, row: Row) -> None:
        piece, row.tokens = self.text.push(row)
        self.pieces.append(piece)
        self.tokens += row.tokens

    def answer(self, branch: Branch) -> Answer:
        """Return the answer of a branch that has ended."""
        reason, error = branch.row.finish_reason or "", branch.error
        if reason == "not_finite":
            error = "the target's logits are not finite"
        return Answer("".join(self.pieces), tuple(self.tokens), reason, error, branch.stats)


class Rounds:
    """The queue between drafting and verifying (Algorithm 2's deque Q and label map γ): branches wait to
    draft, in order, then with a draft to be verified, in order. Safe between threads.
    """

    def __init__(self) -> None:
        self.to_draft: deque[Branch] = deque()
        self.ready: deque[Branch] = deque()
        self.closed = False
        self.changes = 0
        self.changed = threading.Condition()

    def close(self) -> None:
        """Let all threads that wait go."""
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
        """Take the first branch of a queue, or all; wait for one. None are there once the rounds are closed.

        Raises:
            RuntimeError: nothing has moved for `patience` seconds.
        """
        with self.changed:
            waited, seen = 0.0, self.changes
            while not queue and not self.closed:
                self.changed.wait(POLL)
                waited = waited + POLL if seen == self.changes else 0.0
                seen = self.changes
                if waited > patience:
                    raise RuntimeError(f"no draft and no verdict for {patience:.0f} s: a worker hangs")
            if self.closed:
                return []
            taken = list(queue) if everything else [queue[0]]
            for _ in taken:
                queue.popleft()
            return taken


class Pace:
    """Called between a piece of work and its result; does nothing by default. Paced runs hold a device here,
    and tests decide who is first."""

    def prefilled(self, began: float, tokens: int) -> None:
        """Follow a forward of the target over this many tokens of prompts, before the drafter reads them."""

    def drafted(self, began: float, branches: Sequence[Branch]) -> None:
        """Follow a draft that began at this time of the timeline's clock."""

    def verified(self, began: float, trees: Sequence[TokenTree]) -> None:
        """Follow a forward of the target over these trees, before acceptance (on a GPU after it)."""
