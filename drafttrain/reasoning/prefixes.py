"""Prompts encoded once: the samples of one prompt, and what different prompts begin with alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import torch

from drafttrain.inference.acceptance import AcceptanceRule
from drafttrain.inference.many import read_many
from drafttrain.inference.proposer import Proposer
from drafttrain.inference.session import DRAFT_SLOTS, Session, choose_root
from drafttrain.target_lm.cache import TreeCache
from drafttrain.target_lm.masks import causal
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.tree import TokenTree

# Tokens of prompts that are encoded together, the padding of the drafter's forward included: with some
# hundreds the target computes as fast as it can, and more would only keep the first of them waiting.
TOGETHER = 512
WORTH = 16  # tokens that cost about as much as a forward of their own: for fewer, no prompt waits for another


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

    A session from the store has the same keys, values and states as one from `prefill`, encoded alone or
    together with others: bit for bit with the native forward, else up to rounding.

    Args:
        capacity: tokens of all prompts that are kept; 0: each prompt is encoded alone.

    Attributes:
        encoded, shared: prompt tokens so far that were run through the target, and that were copied.
    """

    def __init__(self, target: FrozenTarget, proposer: Proposer, capacity: int):
        self.target, self.proposer, self.capacity = target, proposer, capacity
        self.kept: list[Encoded] = []  # the newest last
        self.encoded = self.shared = 0

    def together(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Return the numbers of the prompts to encode in the next forward: the first one, and those that fit
        beside it and have nothing to copy from it or from each other."""
        chosen: list[int] = []
        widest = 0
        for number, prompt in enumerate(map(list, prompts)):
            known = _known(self._find(prompt), prompt)
            width = max(widest, len(prompt) - known)
            if chosen and (len(chosen) + 1) * width > TOGETHER:
                continue
            enough = min(len(prompt), known + WORTH)
            waits = self.capacity and known < len(prompt)
            if waits and any(_shared(list(prompts[other]), prompt) >= enough for other in chosen):
                continue
            chosen.append(number)
            widest = width
        return chosen

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        max_len: Sequence[int],
        accept: Sequence[AcceptanceRule],
        proposers: Sequence[Proposer],
    ) -> list[Session]:
        """Return a session of each prompt, whose first token is chosen. What is not known of them runs in one
        forward.

        Args:
            max_len: tokens of each prompt and its output together.
            accept: each chooses a first token.
            proposers: for the sessions: the store's, or twins of it.
        """
        prompts, rooms = [list(prompt) for prompt in prompts], [n + DRAFT_SLOTS for n in max_len]
        found = [self._find(prompt) for prompt in prompts]
        new = [i for i, prompt in enumerate(prompts) if _known(found[i], prompt) < len(prompt)]
        if new:
            encoded = self._encode(*([each[i] for i in new] for each in (prompts, rooms, found)))
            for i, one in zip(new, encoded):
                found[i] = one
        self.shared += sum(len(prompt) for i, prompt in enumerate(prompts) if i not in new)
        for one in found:
            if self.capacity and one.logits.max().isfinite():  # NaN would outlive its prompt
                self._keep(one)
        return [self._session(*each) for each in zip(found, rooms, accept, proposers, strict=True)]

    def _session(self, encoded: Encoded, room: int, accept: AcceptanceRule, proposer: Proposer) -> Session:
        cache, state, length = encoded.cache, encoded.state, len(encoded.tokens)
        if self.capacity:
            cache = cache.copy(length, room)
            state = self._state(encoded, length, room)
        last = torch.tensor(encoded.tokens[-1:], device=self.target.device)  # [1]
        logits = encoded.logits[None, None]  # [1, 1, V]
        # the last prompt token plays the root of a tree without drafts
        accepted = accept(TokenTree.root_only(last), logits)
        root, _ = choose_root(cache, accepted, logits, encoded.tapped[None])
        return Session(self.target, proposer, cache, state, root)

    def _find(self, prompt: list[int]) -> Encoded | None:
        """Return the prompt that begins like this one for longest; None if none does."""
        best = max(self.kept, key=lambda one: _shared(one.tokens, prompt), default=None)
        return best if best is not None and _shared(best.tokens, prompt) else None

    def _encode(
        self, prompts: list[list[int]], rooms: list[int], likes: list[Encoded | None]
    ) -> list[Encoded]:
        """Run what prompts do not share with others that are known through target and proposer."""
        target, proposer, device = self.target, self.proposer, self.target.device
        known = [_known(like, prompt) for like, prompt in zip(likes, prompts)]
        tokens = [torch.tensor([prompt[n:]], device=device) for prompt, n in zip(prompts, known)]  # [1, n]
        orders = [torch.arange(one.shape[1], device=device) for one in tokens]  # [n]
        counts = [torch.full_like(order[:1], len(order)) for order in orders]  # [1]
        widest = max(map(len, orders))
        caches, drafts = [], []
        for prompt, room, like, n in zip(prompts, rooms, likes, known):
            room = len(prompt) if self.capacity else room
            wide = max(room, n + widest)  # the proposer pads the tokens that it reads together
            caches.append(like.cache.copy(n, room) if n else target.new_cache(1, room))
            drafts.append(self._state(like, n, wide) if n else proposer.new_state(1, wide))
        seen = [causal(len(order), device) for order in orders]
        states = target.forward_many(caches, tokens, orders, seen)
        for cache, order, count in zip(caches, orders, counts):
            cache.commit(order[None], count)
        tapped = [one.tapped for one in states]
        for begins in (True, False):  # proposers read the beginning of a text in another way than the rest
            rows = [i for i, n in enumerate(known) if (n == 0) == begins]
            if rows:
                read_many(proposer, *([each[i] for i in rows] for each in (drafts, tokens, tapped, counts)))
        logits = target.head(torch.stack([one.final[0, -1] for one in states]))  # [B, V]
        self.encoded, self.shared = self.encoded + sum(map(len, orders)), self.shared + sum(known)
        whole = [
            torch.cat([like.tapped[:n], one[0]]) if n else one[0]
            for like, n, one in zip(likes, known, tapped)
        ]
        return [Encoded(*each) for each in zip(prompts, caches, drafts, whole, logits)]

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
        """Keep a prompt as the newest in place of those that it begins with, and forget the oldest beyond the
        capacity."""
        longer = encoded.tokens
        self.kept = [one for one in self.kept if one.tokens != longer[: len(one.tokens)]] + [encoded]
        while len(self.kept) > 1 and sum(len(one.tokens) for one in self.kept) > self.capacity:
            del self.kept[0]


def _known(like: Encoded | None, prompt: list[int]) -> int:
    """Return how many tokens of a prompt need not be run: those that another one begins with as well, but the
    last, whose logits are wanted, only if they are the same prompt."""
    if like is None or like.tokens == prompt:
        return 0 if like is None else len(prompt)
    return min(_shared(like.tokens, prompt), len(prompt) - 1)


def _shared(a: list[int], b: list[int]) -> int:
    return len(commonprefix([a, b]))
