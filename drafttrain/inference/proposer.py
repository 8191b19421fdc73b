"""Propose trees to the decode loop: a model drafter with a growth policy, or nothing."""

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drafttrain.trees.drafter import Drafter
from drafttrain.trees.interface import TreePolicy
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError


class Proposer(ABC):
    """Proposes a tree after the last committed token. It sees verified tokens only: nothing is rolled back.

    Attributes:
        model_seconds: time spent in a model's forwards so far.
        needs_last_update: it also gets the update of the step in which the last texts end.
        reads_alone: it reads sequences one by one, which is no slower; an error leaves those before it read.
    """

    model_seconds: float = 0.0
    needs_last_update: bool = False
    reads_alone: bool = False

    @abstractmethod
    def new_state(self, batch: int, max_len: int) -> Any:
        """Return the empty state of `batch` sequences, with room for `max_len` tokens of each: prompt, output
        and the tree in flight."""

    @abstractmethod
    def select_rows(self, state: Any, rows: torch.Tensor) -> Any:
        """Return the state of the sequences of these numbers, int64 [b]; one that is named twice becomes two
        independent ones, and those that are not named have ended."""

    @abstractmethod
    def append_rows(self, state: Any, other: Any) -> Any:
        """Return the state of these sequences and, after them, those of another state."""

    def prefix(self, state: Any, length: int, room: int, tapped: torch.Tensor) -> Any:
        """Return a state of its own for the first `length` tokens of the only sequence of `state`, with room
        for `room` tokens. The target's tapped states at the last of them are [K*H]. None, as here: a state
        cannot be shortened, and the text is read again."""
        return None

    def join(self, states: Sequence[Any]) -> Any:
        """Return the sequences of several states as one, for an update or a tree; `split` follows, and nobody
        touches the states before it. None, as here: they are drafted for one by one."""
        return None

    def split(self, joined: Any, states: Sequence[Any]) -> None:
        """Give the states what has happened to them in `joined`."""

    def learned(self, state: Any) -> Any:
        """Return what the only sequence of `state` has learned from its text. None, as here: nothing."""
        return None

    def share(self, state: Any, learned: Any) -> None:
        """Let the only sequence of `state` draft from what another one of its prompt has learned, and the
        other way round."""

    @abstractmethod
    def update(self, state: Any, tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor) -> None:
        """Append what the target has verified: the prompts, then each accepted path, root first.

        Args:
            tokens: [B, m], of which the first counts[b] are valid in row b.
            tapped: the target's tapped hidden states at these tokens, [B, m, K*H].
            counts: [B].
        """

    @abstractmethod
    def propose(self, state: Any, root: torch.Tensor) -> TokenTree:
        """Return trees whose roots are the last emitted tokens [B], which `update` has not had yet."""

    @property
    def draws(self) -> bool:
        """Return whether candidates are drawn at random, which needs another acceptance rule."""
        return False

    def set_active(self, seeds: Sequence[int], positions: Sequence[int]) -> None:
        """Note the seeds of the sequences that the next trees are for, and how many tokens each has emitted;
        only proposers that draw need them."""

    def note_step(self, batch: int, tokens: int, seconds: float) -> None:
        """Note a step, from proposal to update, as `TreePolicy.note_step`."""

    def twin(self) -> "Proposer":
        """Return a proposer for another thread, which shares what is large; this one if it keeps nothing
        between calls but in states."""
        return self

    def harvest(self, state: Any, tree: TokenTree, logits: torch.Tensor) -> None:
        """Learn from the target's logits [B, n, V] after every node, rejected ones too; before `update`."""


@dataclass
class TreeProposer(Proposer):
    """A model drafter whose trees grow by a policy. The policy gets this object as its drafter, so that the
    drafter's forwards are timed.

    Raises:
        UserError: the drafter does not reach as deep as the policy's trees, or has too few tokens.
    """

    drafter: Drafter
    policy: TreePolicy
    model_seconds: float = 0.0

    def __post_init__(self):
        reach = getattr(self.drafter, "max_depth", None)
        if reach is not None and self.policy.max_depth > reach:
            raise UserError(
                f"tree: must be at most {reach} tokens deep for this drafter, got one of up to "
                f"{self.policy.max_depth}; use a shallower one"
            )
        if (widest := max(getattr(self.policy, "k_config", (0,)))) > (size := self.draft_vocab_size):
            raise UserError(f"k_config: must be at most {size}, the drafter's vocabulary, got {widest}")

    def new_state(self, batch: int, max_len: int) -> Any:
        return self.drafter.new_state(batch, max_len)

    @property
    def draws(self) -> bool:
        return self.policy.draws

    def set_active(self, seeds: Sequence[int], positions: Sequence[int]) -> None:
        self.policy.set_active(seeds, positions)

    def note_step(self, batch: int, tokens: int, seconds: float) -> None:
        self.policy.note_step(batch, tokens, seconds)

    def twin(self) -> "TreeProposer":
        return TreeProposer(self.drafter, copy.copy(self.policy))

    def select_rows(self, state: Any, rows: torch.Tensor) -> Any:
        return self.drafter.select_rows(state, rows)

    def append_rows(self, state: Any, other: Any) -> Any:
        return self.drafter.append_rows(state, other)

    def prefix(self, state: Any, length: int, room: int, tapped: torch.Tensor) -> Any:
        return self.drafter.prefix(state, length, room, tapped)

    def join(self, states: Sequence[Any]) -> Any:
        return self.drafter.join(states)

    def split(self, joined: Any, states: Sequence[Any]) -> None:
        self.drafter.split(joined, states)

    def update(self, state: Any, tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor) -> None:
        self._time(counts, self.drafter.update, state, tokens, tapped, counts)

    def propose(self, state: Any, root: torch.Tensor) -> TokenTree:
        return self.policy.grow(self, state, root)

    # the Drafter that the policy sees

    @property
    def draft_vocab_size(self) -> int:
        return self.drafter.draft_vocab_size

    def expand(self, state: Any, tree: TokenTree, frontier: torch.Tensor) -> torch.Tensor:
        return self._time(frontier, self.drafter.expand, state, tree, frontier)

    def top(
        self, state: Any, tree: TokenTree, frontier: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._time(frontier, self.drafter.top, state, tree, frontier, k)

    def grow_natively(self, grow: Callable, state: Any, root: torch.Tensor, *given: Any) -> Any:
        call = getattr(self.drafter, "grow_natively", None)
        return call and self._time(root, call, grow, state, root, *given)

    def to_target(self, ids: torch.Tensor) -> torch.Tensor:
        return self.drafter.to_target(ids)

    def _time(self, like: torch.Tensor, call: Callable, *given: Any) -> Any:
        """Call the model; its time counts as such, on the device of a tensor."""
        wait = torch.cuda.synchronize if like.device.type == "cuda" else lambda device: None
        wait(like.device)
        started = time.perf_counter()
        found = call(*given)
        wait(like.device)
        self.model_seconds += time.perf_counter() - started
        return found


class NoProposer(Proposer):
    """Drafts nothing, which makes the decode loop plain autoregressive decoding."""

    def new_state(self, batch: int, max_len: int) -> None:
        return None

    def select_rows(self, state: None, rows: torch.Tensor) -> None:
        return None

    def append_rows(self, state: None, other: None) -> None:
        return None

    def join(self, states: Sequence[None]) -> tuple:
        return ()

    def update(self, state: None, tokens: torch.Tensor, tapped: torch.Tensor, counts: torch.Tensor) -> None:
        pass

    def propose(self, state: None, root: torch.Tensor) -> TokenTree:
        return TokenTree.root_only(root)
