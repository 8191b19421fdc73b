"""Who the decode loop asks for trees: a model drafter with a growth policy, or nobody."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from drafttrain.drafters.interface import Drafter
from drafttrain.errors import UserError
from drafttrain.trees.interface import TreePolicy
from drafttrain.trees.tree import TokenTree


class Proposer(Protocol):
    """Proposes a tree behind the last committed token. It sees verified tokens only: nothing is ever rolled
    back. One that knows something of single prompts beside its state has a method `use_rows(numbers)`, which
    is told which prompts the next trees are for. One that learns from what the target says behind each node
    of a tree, rejected drafts included, has a method `harvest(state, tree, logits)`, logits [B, n, V], which
    is called before `observe`.

    Attributes:
        model_seconds: time spent in a model's forwards so far.
    """

    model_seconds: float

    def new_state(self, batch: int, max_len: int) -> Any:
        """Empty state for `batch` sequences of at most `max_len` tokens, prompt included."""

    def keep_rows(self, state: Any, rows: torch.Tensor) -> Any:
        """The state of the sequences of these numbers alone, int64 [b]; the others have ended."""

    def put_rows(self, state: Any, rows: torch.Tensor, other: Any) -> None:
        """The sequences of another state take the place of those of these numbers, int64 [b]."""

    def observe(self, state: Any, tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor) -> None:
        """Takes in what the target has verified: the prompts, then each accepted path, root first.

        Args:
            tokens: [B, m], of which the first counts[b] are valid in row b.
            tapped: the target's tapped hidden states at these tokens, [B, m, K*H].
            counts: [B].
        """

    def propose(self, state: Any, root: torch.Tensor) -> TokenTree:
        """Trees whose roots are the last emitted tokens [B], which have not been observed yet."""


@dataclass
class TreeProposer:
    """A model drafter whose trees grow by a policy. What the policy gets as its drafter is this object, which
    looks at the clock.

    Raises:
        UserError: the drafter does not reach as deep as the policy's trees.
    """

    drafter: Drafter
    policy: TreePolicy
    model_seconds: float = 0.0

    def __post_init__(self):
        reach = getattr(self.drafter, "max_depth", None)
        if reach is not None and self.policy.max_depth > reach:
            raise UserError(
                f"the tree is up to {self.policy.max_depth} tokens deep and this drafter reaches {reach}: "
                "use a shallower one"
            )

    def new_state(self, batch: int, max_len: int) -> Any:
        return self.drafter.new_state(batch, max_len + self.policy.max_depth)

    def use_rows(self, numbers: Sequence[int]) -> None:
        if hasattr(self.policy, "use_rows"):  # most policies know nothing of single prompts
            self.policy.use_rows(numbers)

    def keep_rows(self, state: Any, rows: torch.Tensor) -> Any:
        return self.drafter.keep_rows(state, rows)

    def put_rows(self, state: Any, rows: torch.Tensor, other: Any) -> None:
        self.drafter.put_rows(state, rows, other)

    def observe(self, state: Any, tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor) -> None:
        started = self._now(counts)
        self.drafter.observe(state, tokens, tapped, counts)
        self.model_seconds += self._now(counts) - started

    def propose(self, state: Any, root: torch.Tensor) -> TokenTree:
        return self.policy.grow(self, state, root)

    # the Drafter that the policy sees

    @property
    def draft_vocab_size(self) -> int:
        return self.drafter.draft_vocab_size

    def expand(self, state: Any, tree: TokenTree, frontier: torch.Tensor) -> torch.Tensor:
        started = self._now(frontier)
        log_probs = self.drafter.expand(state, tree, frontier)
        self.model_seconds += self._now(frontier) - started
        return log_probs

    def top(
        self, state: Any, tree: TokenTree, frontier: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        started = self._now(frontier)
        found = self.drafter.top(state, tree, frontier, k)
        self.model_seconds += self._now(frontier) - started
        return found

    def to_target(self, ids: torch.Tensor) -> torch.Tensor:
        return self.drafter.to_target(ids)

    @staticmethod
    def _now(like: torch.Tensor) -> float:
        if like.device.type == "cuda":
            torch.cuda.synchronize(like.device)
        return time.perf_counter()


class PerSequence:
    """What proposers share whose state is a list with an item for each sequence, and who run no model."""

    model_seconds = 0.0

    def keep_rows(self, state: list, rows: torch.Tensor) -> list:
        return [state[row] for row in rows.tolist()]

    def put_rows(self, state: list, rows: torch.Tensor, other: list) -> None:
        for row, sequence in zip(rows.tolist(), other, strict=True):
            state[row] = sequence


class NoProposer:
    """Drafts nothing, which makes the decode loop plain autoregressive decoding."""

    model_seconds = 0.0

    def new_state(self, batch: int, max_len: int) -> None:
        return None

    def keep_rows(self, state: None, rows: torch.Tensor) -> None:
        return None

    def put_rows(self, state: None, rows: torch.Tensor, other: None) -> None:
        pass

    def observe(self, state: None, tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor) -> None:
        pass

    def propose(self, state: None, root: torch.Tensor) -> TokenTree:
        return TokenTree.root_only(root)
