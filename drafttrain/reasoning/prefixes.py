"""Prefix cache: samples of one prompt share its encoding, and different prompts that of a common prefix."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any

import torch

from drafttrain.inference.acceptance import AcceptanceRule
from drafttrain.inference.many import heads, nodes_of, read_many, run_target_many
from drafttrain.inference.proposer import NoProposer, Proposer
from drafttrain.inference.session import DRAFT_SLOTS, STRETCH, Session, choose_root
from drafttrain.target_lm.cache import TreeCache
from drafttrain.target_lm.masks import causal
from drafttrain.target_lm.model import FrozenTarget, TargetStates
from drafttrain.trees.tree import TokenTree

# Tokens of the prompts that are encoded in one forward, padding of the drafter's forward included: a few
# hundred saturate the target, and more would only make the first of these prompts wait.
TOGETHER = 512
WORTH = 16  # tokens that cost as much as one more forward: no prompt waits for another to copy fewer


@dataclass
class Encoded:
    """A prompt in the caches of target and proposer.

    Attributes:
        tokens: of the prompt.
        cache: the target's KV cache of the prompt; with room for more only if the store keeps nothing.
        state: the proposer's state after the prompt; None if it has not read the prompt.
        tapped: the target's tapped states, [n, K·H].
        logits: after the prompt, [V].
        is_finite: whether the largest logit is finite; if one is NaN, it is not.
    """

    tokens: list[int]
    cache: TreeCache
    tapped: torch.Tensor
    logits: torch.Tensor
    is_finite: bool
    state: Any = None


@dataclass
class Encoding:
    """A prompt on its way into the target's KV cache.

    Attributes:
        tokens: of the prompt.
        done: how many of them are in the cache.
        cache: the target's; None if the prompt is copied as a whole.
        tapped: the target's tapped states, [n, K·H] for the copied prefix and for each forward.
        encoded: the prompt once all of it is there.
    """

    tokens: list[int]
    done: int = 0
    cache: TreeCache | None = None
    tapped: list[torch.Tensor] = field(default_factory=list)
    encoded: Encoded | None = None

    @property
    def left(self) -> int:
        """Return how many tokens have to run yet."""
        return len(self.tokens) - self.done


class PrefixStore:
    """Cache of the newest encoded prompts. A new prompt copies the longest prefix that it shares with one.

    A session from the store has the same keys, values and states as one from `prefill`, also if its prompt
    was encoded with others: bit for bit with the native forward, else up to rounding.

    Args:
        capacity: maximum number of tokens of all kept prompts together; a longer prompt is not kept. 0:
            nothing is kept or copied.

    Attributes:
        encoded, shared: prompt tokens so far that were run through the target, and that were copied instead.
    """

    def __init__(self, target: FrozenTarget, proposer: Proposer, capacity: int):
        self.target, self.proposer, self.capacity = target, proposer, capacity
        self.kept: list[Encoded] = []  # the newest last
        self.encoded = self.shared = 0

    def together(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Return the indices of the prompts to encode in the next forward: the first one, and others that fit
        in and gain too little (`WORTH`) by waiting to copy a prefix from a chosen one."""
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

    def holds(self, prompt: Sequence[int]) -> bool:
        """Return whether a prompt can be copied as a whole."""
        wanted = list(prompt)
        return any(one.tokens == wanted for one in self.kept)

    def begin(self, prompts: Sequence[Sequence[int]], max_len: Sequence[int]) -> list[Encoding]:
        """Return prompts with the prefixes that can be copied from kept ones.

        Args:
            max_len: tokens of each prompt and its output together, as for `read` and `sessions`.
        """
        return [self._begin(list(prompt), room) for prompt, room in zip(prompts, _rooms(max_len))]

    def encode(
        self,
        prompts: Sequence[Encoding],
        limit: int | None = None,
        sessions: Sequence[Session] = (),
        trees: Sequence[TokenTree] = (),
    ) -> list[tuple[TargetStates, torch.Tensor]]:
        """Run the next tokens of prompts, and draft trees of sessions beside them, in one target forward.

        Args:
            limit: the most prompt tokens that run, the first prompts first (chunked prefill). None: all, but
                for those of a prompt beyond `STRETCH`.

        Returns:
            the target's states and logits [1, n, V] at the nodes of each tree.
        """
        chunks = [(one, self._chunk(one, n)) for one, n in zip(prompts, _shares(prompts, limit)) if n]
        if not chunks:
            return run_target_many(sessions, trees) if trees else []
        nodes = [(one.cache, *chunk) for one, chunk in chunks] + nodes_of(sessions, trees)
        states = self.target.forward_many(*zip(*nodes))
        ended, last = [], []
        for (one, (_, order, _)), found in zip(chunks, states):
            n = len(order)
            one.cache.add(torch.full_like(order[:1], n), n)
            one.tapped.append(_own(found.tapped[0]))
            one.done += n
            self.encoded += n
            if not one.left:
                ended.append(one)
                last.append(found.final[:, -1])  # [1, H]
        at_nodes = states[len(chunks) :]
        finals = [*last, *(found.final for found in at_nodes)]
        logits = heads(self.target, finals) if finals else []  # [1, V] each, [1, n, V] each
        if ended:
            self._end(ended, torch.cat(logits[: len(ended)]))
        return list(zip(at_nodes, logits[len(ended) :]))

    def read(self, encoded: Sequence[Encoded], max_len: Sequence[int], proposers: Sequence[Proposer]) -> None:
        """Prefill the proposer with prompts that it has not read yet and that will get drafts."""
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
        """Keep prompts in the store, and return a session for each, with its first token chosen.

        Args:
            accept: acceptance rules, each of which chooses a first token.
            proposers: of the sessions: the store's, twins of it, or a `NoProposer`, for which the store's
                need not have read the prompt.
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
        """Return the kept prompt with the longest prefix in common with this one; None if there is none.

        Args:
            read: consider only prompts that the proposer has read.
        """
        among = (one for one in self.kept if one.state is not None or not read)
        best = max(among, key=lambda one: (_shared(one.tokens, prompt), one.tokens == prompt), default=None)
        return best if best is not None and _shared(best.tokens, prompt) else None

    def _begin(self, prompt: list[int], room: int) -> Encoding:
        like = self._find(prompt)
        known = _known(like, prompt)
        self.shared += known
        if known == len(prompt):
            return Encoding(prompt, known, encoded=like)
        room = len(prompt) if self.capacity else room
        if not known:
            return Encoding(prompt, 0, self.target.new_cache(1, room))
        return Encoding(prompt, known, like.cache.copy(known, room), [like.tapped[:known]])

    def _chunk(self, one: Encoding, n: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a prompt's next n tokens [1, n], their depths [n] and what they see [n, n]."""
        device = self.target.device
        tokens = torch.tensor([one.tokens[one.done : one.done + n]], device=device)  # [1, n]
        return tokens, torch.arange(n, device=device), causal(n, device)

    def _end(self, prompts: Sequence[Encoding], logits: torch.Tensor) -> None:
        """Note that prompts are encoded, with the logits [B, V] after each."""
        finite = logits.amax(1).isfinite().tolist()  # waits for a GPU, so that its work is done on return
        for one, row, is_finite in zip(prompts, logits, finite):
            tapped = torch.cat(one.tapped) if len(one.tapped) > 1 else one.tapped[0]  # [n, K·H]
            one.encoded = Encoded(one.tokens, one.cache, tapped, _own(row), is_finite)

    def _read(self, encoded: list[Encoded], rooms: list[int]) -> None:
        """Prefill the proposer with prompts that it has not read, but for prefixes of prompts that it has."""
        pairs = {id(one): (one, room) for one, room in zip(encoded, rooms) if one.state is None}
        unread, rooms = ([pair[i] for pair in pairs.values()] for i in (0, 1))
        likes = [self._find(one.tokens, read=True) for one in unread]
        known = [_known(like, one.tokens) for like, one in zip(likes, unread)]
        states: list[Any] = [None for _ in unread]  # assigned to a prompt once it has been read to its end
        for begins in (True, False):  # proposers read the start of a text differently from the rest
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
        """Return an independent proposer state for the first `length` tokens of an encoded prompt."""
        state = self.proposer.prefix(encoded.state, length, room, encoded.tapped[length - 1])
        if state is None:  # cannot be shortened: the tokens are read again
            state = self.proposer.new_state(1, room)
            tokens = torch.tensor([encoded.tokens[:length]], device=self.target.device)
            count = torch.tensor([length], device=self.target.device)
            self.proposer.update(state, tokens, encoded.tapped[None, :length], count)
        return state

    def _keep(self, encoded: Encoded) -> None:
        """Keep a prompt as the newest one. It replaces kept prompts that are prefixes of it, except those
        that the proposer has read if it has not read this one. Drop the oldest beyond the capacity; a prompt
        longer than that is not kept."""
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


def _own(row: torch.Tensor) -> torch.Tensor:
    """Return a row in memory of its own: a kept one would keep those of all prompts of its forward."""
    return row if row.untyped_storage().nbytes() == row.nbytes else row.clone()


def _shares(prompts: Sequence[Encoding], limit: int | None) -> list[int]:
    """Return how many tokens of each prompt run in the next forward."""
    shares = []
    for one in prompts:
        n = min(one.left, STRETCH) if limit is None else min(one.left, STRETCH, limit - sum(shares))
        shares.append(n)
    return shares


def _rooms(max_len: Sequence[int]) -> list[int]:
    """Return the cache slots that texts of these lengths and the drafts after them need."""
    return [n + DRAFT_SLOTS for n in max_len]


def _known(like: Encoded | None, prompt: list[int]) -> int:
    """Return how many tokens of a prompt need not be run: its common prefix with another one. The last token,
    whose logits are needed, is run unless the two prompts are equal."""
    if like is None or like.tokens == prompt:
        return 0 if like is None else len(prompt)
    return min(_shared(like.tokens, prompt), len(prompt) - 1)


def _shared(a: list[int], b: list[int]) -> int:
    return len(commonprefix([a, b]))
