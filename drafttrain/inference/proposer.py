"""Proposers of trees for the decode loop: the interface, a model drafter with a growth policy, and none."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drafttrain.inference.stats import Stopwatch, stopwatch
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.interface import TreePolicy
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError


class Proposer(ABC):
    """Proposes trees after the last committed token. It reads verified tokens only: nothing is rolled back.

    Attributes:
        model_seconds: time spent in a model's forwards so far.
        needs_last_update: call `update` also after the step in which the last outputs end.
        reads_alone: update states one by one, which is no slower; an error leaves the earlier ones updated.
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
        """Return the state of the sequences with these indices, int64 [b]: one that occurs twice becomes two
        independent ones, and the others are dropped."""

    @abstractmethod
    def append_rows(self, state: Any, other: Any) -> Any:
        """Return one state with the sequences of `state` and then those of `other`."""

    def prefix(self, state: Any, length: int, room: int, tapped: torch.Tensor) -> Any:
        """Return a new state for the first `length` tokens of the only sequence of `state`, with room for
        `room` tokens; `tapped` [K*H] are the target's tapped states at the last of them. By default None: a
        state cannot be shortened, and the caller updates an empty one with the text."""
        return None

    def join(self, states: Sequence[Any]) -> Any:
        """Join several states into one, for an update or a proposal; the states must not be used before
        `split`. By default None: they cannot be joined and are processed one by one."""
        return None

    def split(self, joined: Any, states: Sequence[Any]) -> None:
        """Write what has changed in `joined` back to the states."""

    def learned(self, state: Any) -> Any:
        """Return what the only sequence of `state` has learned, for `share`; by default None."""
        return None

    def share(self, state: Any, learned: Any) -> None:
        """Replace what the only sequence of `state` has learned by what another sequence of the same prompt
        has, so that from now on both learn together."""

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
        """Return trees whose roots are the last emitted tokens [B]; `update` gets these only later."""

    @property
    def draws(self) -> bool:
        """Return whether candidates are drawn at random, which needs another acceptance rule."""
        return False

    def set_active(self, seeds: Sequence[int], positions: Sequence[int]) -> None:
        """Set the seeds of the sequences that the next trees are for, and how many tokens each has emitted;
        only proposers that draw need them."""

    def note_step(self, batch: int, tokens: int, seconds: float) -> None:
        """Record tokens and seconds of a batch's step, from proposal to update, as `TreePolicy.note_step`."""

    def twin(self) -> "Proposer":
        """Return a proposer for another thread that shares everything large; this one if nothing outside of
        states is kept between calls."""
        return self

    def harvest(self, state: Any, tree: TokenTree, logits: torch.Tensor) -> None:
        """Learn from the target's logits [B, n, V] after all nodes, rejected ones too; precedes `update`."""


@dataclass
class TreeProposer(Proposer):
    """A model drafter whose trees grow by a policy. The policy gets this object as its drafter, so that the
    drafter's forwards are timed.

    Raises:
        UserError: the policy's trees are deeper than the drafter can draft, or wider than its vocabulary.
    """

    drafter: Drafter
    policy: TreePolicy

    def __post_init__(self):
        self._watch: Stopwatch | None = None  # once the drafter's device is known
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
    def model_seconds(self) -> float:
        return self._watch.seconds if self._watch else 0.0

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
        """Call the model, on the device of `like`, and add its time to `model_seconds`."""
        if self._watch is None:
            self._watch = stopwatch(like.device)
        begun = self._watch.begin()
        found = call(*given)
        self._watch.end(begun)
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
