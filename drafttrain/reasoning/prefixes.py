"""Prompts encoded once: the samples of one prompt, and what different prompts begin with alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

import torch

from drafttrain.inference.acceptance import AcceptanceRule
from drafttrain.inference.many import read_many
from drafttrain.inference.proposer import NoProposer, Proposer
from drafttrain.inference.session import DRAFT_SLOTS, STRETCH, Session, choose_root
from drafttrain.inference.stretches import encode_many_in_stretches
from drafttrain.target_lm.cache import TreeCache
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
        cache: the target's, with the prompt and no room for more.
        state: the proposer's, the same; None: it has not read the prompt.
        tapped: the target's tapped states, [n, K·H].
        logits: after the prompt, [V].
        is_finite: whether all logits are.
    """

    tokens: list[int]
    cache: TreeCache
    tapped: torch.Tensor
    logits: torch.Tensor
    is_finite: bool
    state: Any = None


class PrefixStore:
    """Encoded prompts, the newest ones. A new prompt copies the longest beginning that it shares with one.

    A session from the store has the same keys, values and states as one from `prefill`, encoded alone or
    together with others: bit for bit with the native forward, else up to rounding.

    Args:
        capacity: tokens of all prompts that are kept, which a single one may not exceed either; 0: each
            prompt is encoded alone.

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

    def encode(self, prompts: Sequence[Sequence[int]], max_len: Sequence[int]) -> list[Encoded]:
        """Return prompts in the target's cache. What is not known of them runs in one forward, or in a few
        where it is long.

        Args:
            max_len: tokens of each prompt and its output together, as for `read` and `sessions`.
        """
        prompts, rooms = [list(prompt) for prompt in prompts], _rooms(max_len)
        found = [self._find(prompt) for prompt in prompts]
        new = [i for i, prompt in enumerate(prompts) if _known(found[i], prompt) < len(prompt)]
        if new:
            encoded = self._encode(*([each[i] for i in new] for each in (prompts, rooms, found)))
            for i, one in zip(new, encoded):
                found[i] = one
        self.shared += sum(len(prompt) for i, prompt in enumerate(prompts) if i not in new)
        return found

    def read(self, encoded: Sequence[Encoded], max_len: Sequence[int], proposers: Sequence[Proposer]) -> None:
        """Let the proposer read what it has not read of the prompts that are drafted for."""
        triples = zip(encoded, _rooms(max_len), proposers, strict=True)
        drafted = [(one, room) for one, room, proposer in triples if not isinstance(proposer, NoProposer)]
        if drafted:
            self._read(*map(list, zip(*drafted)))

    def sessions(
        self,
        encoded: Sequence[Encoded],
        max_len: Sequence[int],
        accept: Sequence[AcceptanceRule],
        proposers: Sequence[Proposer],
    ) -> list[Session]:
        """Keep prompts, and return a session of each, whose first token is chosen.

        Args:
            accept: each chooses a first token.
            proposers: for the sessions: the store's, twins of it, or a `NoProposer`, for which the store's
                has read nothing.
        """
        for one in encoded:
            if self.capacity and one.is_finite:  # NaN would outlive its prompt
                self._keep(one)
        return [
            self._session(*each) for each in zip(encoded, _rooms(max_len), accept, proposers, strict=True)
        ]

    def _session(self, encoded: Encoded, room: int, accept: AcceptanceRule, proposer: Proposer) -> Session:
        cache, state, length = encoded.cache, encoded.state, len(encoded.tokens)
        if isinstance(proposer, NoProposer):
            state = None
        if self.capacity:
            cache = cache.copy(length, room)
            state = None if state is None else self._state(encoded, length, room)
        last = torch.tensor(encoded.tokens[-1:], device=self.target.device)  # [1]
        logits = encoded.logits[None, None]  # [1, 1, V]
        # the last prompt token plays the root of a tree without drafts
        accepted = accept(TokenTree.root_only(last), logits)
        root, _ = choose_root(cache, accepted, logits, encoded.tapped[None])
        return Session(self.target, proposer, cache, state, root)

    def _find(self, prompt: list[int], read: bool = False) -> Encoded | None:
        """Return the prompt that begins like this one for longest; None if none does.

        Args:
            read: of those alone that the proposer has read.
        """
        among = (one for one in self.kept if one.state is not None or not read)
        best = max(among, key=lambda one: (_shared(one.tokens, prompt), one.tokens == prompt), default=None)
        return best if best is not None and _shared(best.tokens, prompt) else None

    def _encode(
        self, prompts: list[list[int]], rooms: list[int], likes: list[Encoded | None]
    ) -> list[Encoded]:
        """Run what prompts do not share with others that are known through the target."""
        target, device = self.target, self.target.device
        known = [_known(like, prompt) for like, prompt in zip(likes, prompts)]
        tokens = [torch.tensor([prompt[n:]], device=device) for prompt, n in zip(prompts, known)]  # [1, n]
        caches = []
        for prompt, room, like, n in zip(prompts, rooms, likes, known):
            room = len(prompt) if self.capacity else room
            caches.append(like.cache.copy(n, room) if n else target.new_cache(1, room))
        states = encode_many_in_stretches(target, caches, tokens, STRETCH)
        logits = target.head(torch.stack([one.final[0, -1] for one in states]))  # [B, V]
        self.encoded += sum(one.shape[1] for one in tokens)
        self.shared += sum(known)
        tapped = [
            torch.cat([like.tapped[:n], one.tapped[0]]) if n else one.tapped[0]
            for like, n, one in zip(likes, known, states)
        ]
        finite = logits.amax(1).isfinite().tolist()  # waits for a GPU: its work is done when this returns
        return [Encoded(*each) for each in zip(prompts, caches, tapped, logits, finite)]

    def _read(self, encoded: list[Encoded], rooms: list[int]) -> None:
        """Let the proposer read the prompts that it has not read yet, but for what they share with others."""
        pairs = {id(one): (one, room) for one, room in zip(encoded, rooms) if one.state is None}
        unread, rooms = ([pair[i] for pair in pairs.values()] for i in (0, 1))
        likes = [self._find(one.tokens, read=True) for one in unread]
        known = [_known(like, one.tokens) for like, one in zip(likes, unread)]
        states: list[Any] = [None for _ in unread]  # a prompt has its own once it is read to its end
        for begins in (True, False):  # proposers read the beginning of a text in another way than the rest
            rows = [i for i, n in enumerate(known) if (n == 0) == begins]
            if not rows:
                continue
            new = [torch.tensor([unread[i].tokens[known[i] :]], device=self.target.device) for i in rows]
            widest = max(tokens.shape[1] for tokens in new)
            for i in rows:
                one, n = unread[i], known[i]
                # the proposer pads the tokens that it reads together
                room = max(len(one.tokens) if self.capacity else rooms[i], n + widest)
                states[i] = self._state(likes[i], n, room) if n else self.proposer.new_state(1, room)
            tapped = [unread[i].tapped[None, known[i] :] for i in rows]  # [1, n, K·H] each
            counts = [torch.full_like(tokens[0, :1], tokens.shape[1]) for tokens in new]  # [1] each
            read_many(self.proposer, [states[i] for i in rows], new, tapped, counts)
            for i in rows:
                unread[i].state = states[i]

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
        """Keep a prompt as the newest in place of those that it begins with, unless only they have been read
        by the proposer, and forget the oldest beyond the capacity. One that is longer than that is not
        kept."""
        longer, read = encoded.tokens, encoded.state is not None
        if len(longer) > self.capacity:
            return
        others = [one for one in self.kept if one is not encoded]
        self.kept = [
            one
            for one in others
            if one.tokens != longer[: len(one.tokens)] or (one.state is not None and not read)
        ] + [encoded]
        while sum(len(one.tokens) for one in self.kept) > self.capacity:
            del self.kept[0]


def _rooms(max_len: Sequence[int]) -> list[int]:
    """Return the slots that caches need for texts and the drafts after them."""
    return [n + DRAFT_SLOTS for n in max_len]


def _known(like: Encoded | None, prompt: list[int]) -> int:
    """Return how many tokens of a prompt need not be run: those that another one begins with as well, but the
    last, whose logits are wanted, only if they are the same prompt."""
    if like is None or like.tokens == prompt:
        return 0 if like is None else len(prompt)
    return min(_shared(like.tokens, prompt), len(prompt) - 1)


def _shared(a: list[int], b: list[int]) -> int:
    return len(commonprefix([a, b]))
