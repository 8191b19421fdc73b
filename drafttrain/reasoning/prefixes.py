"""Prompts encoded once: the samples of one prompt, and what different prompts begin with alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import torch

from drafttrain.inference.acceptance import AcceptanceRule
from drafttrain.inference.proposer import Proposer
from drafttrain.inference.session import DRAFT_SLOTS, Session, choose_root
from drafttrain.target_lm.cache import TreeCache
from drafttrain.target_lm.masks import causal
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.tree import TokenTree


@dataclass
class Encoded:
    """A prompt in the caches of target and proposer.

    Attributes:
        tokens: the prompt's.
        cache, state: with the prompt, and no room for more.
        tapped: the target's tapped states, [n, K·H].
        logits: after the prompt, [V].
    """

    tokens: list[int]
    cache: TreeCache
    state: Any
    tapped: torch.Tensor
    logits: torch.Tensor


class PrefixStore:
    """Encoded prompts, the newest ones. A new prompt copies the longest beginning that it shares with one.

    A session from the store has the same keys, values and states as one from `prefill`: bit for bit with the
    native forward, else up to rounding.

    Args:
        capacity: tokens of all prompts that are kept; 0: each prompt is encoded alone.

    Attributes:
        encoded, shared: prompt tokens so far that were run through the target, and that were copied.
    """

    def __init__(self, target: FrozenTarget, proposer: Proposer, capacity: int):
        self.target, self.proposer, self.capacity = target, proposer, capacity
        self.kept: list[Encoded] = []  # the newest last
        self.encoded = self.shared = 0

    def start(
        self, prompt: Sequence[int], max_len: int, accept: AcceptanceRule, proposer: Proposer
    ) -> Session:
        """Return a session of one prompt, whose first token is chosen.

        Args:
            max_len: tokens of prompt and output together.
            accept: chooses the first token.
            proposer: for the session: the store's, or a twin of it.
        """
        prompt, room = list(prompt), max_len + DRAFT_SLOTS
        found = self._find(prompt)
        is_known = found is not None and found.tokens == prompt
        if not is_known:
            found = self._encode(prompt, room, found)
            if self.capacity and found.logits.max().isfinite():  # NaN would outlive its prompt
                self._keep(found)
        else:
            self.shared += len(prompt)
            self.kept.append(self.kept.pop(next(i for i, one in enumerate(self.kept) if one is found)))
        cache, state = found.cache, found.state
        if self.capacity:
            cache = cache.copy(len(prompt), room)
            state = self._state(found, len(prompt), room)
        last = torch.tensor(prompt[-1:], device=self.target.device)  # [1]
        logits = found.logits[None, None]  # [1, 1, V]
        # the last prompt token plays the root of a tree without drafts
        root, _ = choose_root(cache, accept(TokenTree.root_only(last), logits), logits, found.tapped[None])
        return Session(self.target, proposer, cache, state, root)

    def _find(self, prompt: list[int]) -> Encoded | None:
        """Return the prompt that begins like this one for longest; None if none does."""
        best = max(self.kept, key=lambda one: _shared(one.tokens, prompt), default=None)
        return best if best is not None and _shared(best.tokens, prompt) else None

    def _encode(self, prompt: list[int], room: int, like: Encoded | None) -> Encoded:
        """Run what a prompt does not share with another one through target and proposer."""
        target, proposer = self.target, self.proposer
        known = 0 if like is None else min(_shared(like.tokens, prompt), len(prompt) - 1)
        room = len(prompt) if self.capacity else room
        if known:
            cache, state = like.cache.copy(known, room), self._state(like, known, room)
        else:
            cache, state = target.new_cache(1, room), proposer.new_state(1, room)
        tokens = torch.tensor([prompt[known:]], device=target.device)  # [1, n]
        n = tokens.shape[1]
        order = torch.arange(n, device=target.device)  # [n]
        states = target.forward(cache, tokens, order, causal(n, target.device))
        cache.commit(order[None], torch.full_like(order[:1], n))
        proposer.update(state, tokens, states.tapped, torch.full_like(order[:1], n))
        tapped = states.tapped[0] if not known else torch.cat([like.tapped[:known], states.tapped[0]])
        self.encoded, self.shared = self.encoded + n, self.shared + known
        return Encoded(prompt, cache, state, tapped, target.head(states.final[0, -1]))

    def _state(self, encoded: Encoded, length: int, room: int) -> Any:
        """Return a proposer's state of its own for the first tokens of an encoded prompt."""
        state = self.proposer.prefix(encoded.state, length, room, encoded.tapped[length - 1])
        if state is None:  # it reads them again
            state = self.proposer.new_state(1, room)
            tokens = torch.tensor([encoded.tokens[:length]], device=self.target.device)
            count = torch.tensor([length], device=self.target.device)
            self.proposer.update(state, tokens, encoded.tapped[None, :length], count)
        return state

    def _keep(self, encoded: Encoded) -> None:
        """Keep a prompt in place of those that it begins with, and forget the oldest beyond the capacity."""
        longer = encoded.tokens
        self.kept = [one for one in self.kept if one.tokens != longer[: len(one.tokens)]] + [encoded]
        while len(self.kept) > 1 and sum(len(one.tokens) for one in self.kept) > self.capacity:
            del self.kept[0]


def _shared(a: list[int], b: list[int]) -> int:
    return len(commonprefix([a, b]))
