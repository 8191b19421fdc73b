"""The decode loop: propose a tree, verify it with one target forward, keep what is accepted, tell the
proposer.

It knows token ids only; text is `decoder.py`'s business. With `NoProposer` it is plain autoregressive
decoding. Prompts beyond `max_rows` wait until one that is being decoded has ended.
"""

import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from drafttrain.inference.acceptance import AcceptanceRule, Accepted, accept_greedy
from drafttrain.inference.proposer import Proposer
from drafttrain.inference.stats import DecodeStats, ModuleClock
from drafttrain.kernels.team import native_team
from drafttrain.target_lm.cache import TreeCache
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError

DRAFT_SLOTS = 64  # cache slots for the tree in flight beyond the longest output; more are added as needed


@dataclass
class Step:
    """What one target forward brought, prompt by prompt. Prompts without a part in it have an empty share.

    Attributes:
        tokens: emitted tokens; the drafted ones come first.
        drafted: how many of them were drafted.
        verified: draft tokens sent to the target.
        finish_reason: "stop" (a stop token was emitted) or "length" in the step in which an output ends, else
            None.
    """

    tokens: list[list[int]]
    drafted: list[int]
    verified: list[int]
    finish_reason: list[str | None]


@dataclass
class Session:
    """Rows that are decoded together: what the target and the proposer keep of them.

    Attributes:
        cache: the target's keys and values.
        state: the proposer's.
        root: the last emitted tokens, which no forward has had yet, int64 [B].
    """

    target: FrozenTarget
    proposer: Proposer
    cache: TreeCache
    state: object
    root: torch.Tensor

    def replace_rows(self, rows: torch.Tensor, other: "Session") -> None:
        """Put another session's rows in the place of these, int64 [b]."""
        self.cache.replace_rows(rows, other.cache)
        self.proposer.replace_rows(self.state, rows, other.state)
        self.root[rows] = other.root

    def select_rows(self, rows: torch.Tensor) -> None:
        """Go on with these rows alone, int64 [b]; one that is named twice goes on as two independent ones."""
        self.cache.select_rows(rows)
        self.state, self.root = self.proposer.select_rows(self.state, rows), self.root[rows]


@dataclass
class Verified:
    """What one forward of the target gave for a session's trees.

    Attributes:
        tree: the trees that were verified.
        accepted: the path of each row, and the target's own token after it.
        tokens: of the paths, root first, int64 [B, m].
        tapped: the target's tapped hidden states on the paths, [B, m, K*H].
        logits: after every node, [B, n, V].
    """

    tree: TokenTree
    accepted: Accepted
    tokens: torch.Tensor
    tapped: torch.Tensor
    logits: torch.Tensor


def prefill(
    target: FrozenTarget,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    max_len: int,
    accept: AcceptanceRule,
) -> Session:
    """Encode prompts as chains, padded on the right, and choose the first token of each.

    Args:
        prompts: token ids of each.
        max_len: tokens of the longest row at its end, prompt included.

    Raises:
        UserError: the target gives NaN.
    """
    device = target.device
    cache = target.new_cache(len(prompts), max_len + DRAFT_SLOTS)
    state = proposer.new_state(len(prompts), max_len)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)  # [B]
    n = max(map(len, prompts))
    padded = [[*prompt, *[0] * (n - len(prompt))] for prompt in prompts]
    tokens = torch.tensor(padded, device=device)  # [B, n]
    order = torch.arange(n, device=device)  # [n]
    states = target.forward(cache, tokens, order, torch.ones(n, n, dtype=torch.bool, device=device).tril())
    cache.commit(order.expand(len(prompts), n), lengths)
    rows = torch.arange(len(prompts), device=device)  # [B]
    logits = target.head(states.final[rows, lengths - 1])  # [B, V]
    if torch.isnan(logits).any():
        raise UserError(f"{target.name} gives NaN in {target.dtype}: load it in another dtype")
    proposer.update(state, tokens, states.tapped, lengths)
    # the last prompt token plays the root of a tree without drafts
    root = accept(TokenTree.root_only(tokens[rows, lengths - 1]), logits[:, None]).next_token  # [B]
    return Session(target, proposer, cache, state, root)


def propose(session: Session) -> TokenTree:
    """Return the proposer's trees after the session's last tokens."""
    return session.proposer.propose(session.state, session.root)


def verify(session: Session, tree: TokenTree, accept: AcceptanceRule) -> Verified:
    """Run the target over trees, commit the accepted paths to its cache, and set the roots after them."""
    session.cache.reserve(tree.width)
    states = session.target.forward(session.cache, tree.tokens, tree.depths, tree.ancestors())
    logits = session.target.head(states.final)  # [B, n, V]
    accepted = accept(tree, logits)
    session.cache.commit(accepted.path, accepted.counts)
    session.root = accepted.next_token  # [B]
    tokens = tree.tokens.gather(1, accepted.path)  # [B, m]
    wide_path = accepted.path[:, :, None].expand(-1, -1, states.tapped.shape[-1])  # [B, m, K*H]
    return Verified(tree, accepted, tokens, states.tapped.gather(1, wide_path), logits)


def update(session: Session, verified: Verified) -> None:
    """Give the proposer what the target has verified."""
    session.proposer.harvest(session.state, verified.tree, verified.logits)
    session.proposer.update(session.state, verified.tokens, verified.tapped, verified.accepted.counts)


@torch.no_grad()
def decode(
    target: FrozenTarget,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: Collection[int] | None = None,
    accept: AcceptanceRule = accept_greedy,
    stats: DecodeStats | None = None,
    max_rows: int | None = None,
) -> Iterator[Step]:
    """Decodes prompts; yields a step for each target forward, those that encode prompts included.

    Every prompt gives what it would give alone and without a draft (in exact arithmetic; in fp32 up to exact
    ties).

    Args:
        prompts: token ids of each, not empty.
        max_new_tokens: limit of each output; never exceeded, not even by accepted drafts.
        stop: tokens that end an output. They are emitted, nothing after them is. None: the target's own.
        accept: the rule that compares trees with the target's logits.
        stats: counts and times are added to it.
        max_rows: prompts decoded at a time; when one ends, the next takes its place. None: all at once.

    Raises:
        UserError: a prompt is empty, it and max_new_tokens exceed the positions of the target, max_rows is
            below 1, or the target gives NaN.
    """
    _check_lengths(target, prompts, max_new_tokens)
    if max_rows is not None and max_rows < 1:
        raise UserError(f"max_rows is {max_rows}: at least one prompt has to be decoded at a time")
    stats = DecodeStats() if stats is None else stats
    stop = target.eos_token_ids if stop is None else stop
    rows = _Rows(len(prompts), max_rows or len(prompts), max_new_tokens, stop, stats)
    stats.prompts += len(prompts)
    stats.prompt_tokens += sum(map(len, prompts))
    max_len = max(map(len, prompts)) + max_new_tokens
    loop = _Loop(target, proposer, prompts, max_len, accept, rows, stats)
    with loop.clock.on(*target.timed_modules):
        while rows.active:
            with native_team() if target.native is not None else nullcontext():  # the caller has all threads
                step = loop.encode() if rows.new else loop.step()
            yield step


@dataclass
class _Loop:
    """What `decode` goes round."""

    target: FrozenTarget
    proposer: Proposer
    prompts: Sequence[Sequence[int]]
    max_len: int
    accept: AcceptanceRule
    rows: "_Rows"
    stats: DecodeStats
    session: Session | None = None

    def __post_init__(self) -> None:
        self.clock = ModuleClock(self.target.device)

    def encode(self) -> Step:
        """Encode the prompts whose turn it is; each emits its first token."""
        started = time.perf_counter()
        rows = self.rows
        numbers = [rows.active[place] for place in rows.new]
        self._set_active(numbers)
        chosen = [self.prompts[number] for number in numbers]
        # rows that are put into a session need no room of their own for what follows
        room = self.max_len if self.session is None else max(map(len, chosen))
        encoded = prefill(self.target, self.proposer, chosen, room, self.accept)
        if self.session is None:
            self.session = encoded
        else:
            self.session.replace_rows(torch.tensor(rows.new, device=self.target.device), encoded)
        step = rows.first_step(encoded.root)
        self._drop_ended()
        self.stats.prefill_seconds += time.perf_counter() - started
        self.stats.seconds += time.perf_counter() - started
        return step

    def step(self) -> Step:
        """Propose trees, verify them with one forward, commit the accepted paths, update the proposer."""
        started = time.perf_counter()
        session, stats, proposer = self.session, self.stats, self.proposer
        self._set_active(self.rows.active)
        in_model = proposer.model_seconds
        tree = self.rows.trim(propose(session))
        drafted, modules_before = time.perf_counter(), self.clock.seconds
        verified = verify(session, tree, self.accept)
        step = self.rows.step(tree, verified.accepted)
        verified_at = time.perf_counter()
        if self.rows.go_on:
            update(session, verified)
        updated = time.perf_counter()
        self._drop_ended()
        stats.draft_seconds += drafted - started + updated - verified_at
        stats.draft_model_seconds += proposer.model_seconds - in_model
        stats.verify_seconds += self.clock.seconds - modules_before
        stats.seconds += time.perf_counter() - started
        return step

    def _set_active(self, numbers: Sequence[int]) -> None:
        self.accept.set_active(numbers)
        self.proposer.set_active(numbers)

    def _drop_ended(self) -> None:
        kept = self.rows.turn_over()
        if kept is not None:
            self.session.select_rows(torch.tensor(kept, device=self.session.root.device))


def decode_all(
    target: FrozenTarget,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: Collection[int] | None = None,
    accept: AcceptanceRule = accept_greedy,
    max_rows: int | None = None,
) -> tuple[list[list[int]], DecodeStats]:
    """Runs `decode` to its end; returns the emitted tokens of each prompt and the statistics."""
    stats = DecodeStats()
    outputs: list[list[int]] = [[] for _ in prompts]
    for step in decode(target, proposer, prompts, max_new_tokens, stop, accept, stats, max_rows):
        for output, tokens in zip(outputs, step.tokens):
            output += tokens
    return outputs, stats


def _check_lengths(target: FrozenTarget, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
    if max_new_tokens < 1:
        raise UserError(f"max_new_tokens is {max_new_tokens}: ask for at least one token")
    limit = getattr(target.config, "max_position_embeddings", None)
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise UserError(f"prompt {i} has no tokens: give it some text")
        if limit and len(prompt) + max_new_tokens > limit:
            raise UserError(
                f"prompt {i} has {len(prompt)} tokens, which with max_new_tokens {max_new_tokens} exceeds "
                f"the {limit} positions of {target.name}: shorten the prompt or lower max_new_tokens"
            )


class _Rows:
    """What has been emitted for each prompt, and which prompts are being decoded.

    Attributes:
        active: numbers of the prompts that take part, in the order of the batch.
        new: places of those that have not been encoded yet.
    """

    def __init__(
        self, prompts: int, max_rows: int, max_new_tokens: int, stop: Collection[int], stats: DecodeStats
    ):
        self.stop, self.stats = frozenset(stop), stats
        self.left = [max_new_tokens] * prompts  # tokens that each may still emit; 0 once it has ended
        self.active = list(range(min(max_rows, prompts)))
        self.new = list(self.active)
        self.waiting = deque(range(len(self.active), prompts))
        self.outputs: list[list[int]] = [[] for _ in range(prompts)]
        self.step_sizes: list[list[int]] = [[] for _ in range(prompts)]

    @property
    def go_on(self) -> bool:
        """Whether any output of the present batch has not ended."""
        return any(self.left[number] for number in self.active)

    def turn_over(self) -> list[int] | None:
        """Gives the places of outputs that have ended to prompts that wait; places without one fall away.

        Returns:
            the places that stay, in order; None if all do, or none.
        """
        ended = [place for place, number in enumerate(self.active) if not self.left[number]]
        taken = ended[: len(self.waiting)]
        for place in taken:
            self.active[place] = self.waiting.popleft()
        gone = set(ended[len(taken) :])
        kept = [place for place in range(len(self.active)) if place not in gone]
        self.active = [self.active[place] for place in kept]
        self.new = [kept.index(place) for place in taken]
        return kept if gone and kept else None

    def trim(self, tree: TokenTree) -> TokenTree:
        """Drops nodes that no row could emit: a tree of depth d emits up to d + 1 tokens.

        So no node ever lies beyond the last position that plain decoding would use.
        """
        left = [self.left[row] for row in self.active]
        if int(tree.depths.max()) < min(left):
            return tree
        return tree.select(tree.depths < torch.tensor(left, device=tree.depths.device)[:, None])

    def first_step(self, tokens: torch.Tensor) -> Step:
        """Emits the first token of each prompt that is new, [B]."""
        step = self._nothing()
        for row, token in zip([self.active[place] for place in self.new], tokens.tolist()):
            emitted, reason = self._emit(row, [token])
            self.stats.new_tokens += 1
            self._put(step, row, emitted, 0, 0, reason)
        return step

    def step(self, tree: TokenTree, accepted: Accepted) -> Step:
        """Emits each accepted path (but for its root, which is emitted already) and the target's token."""
        columns = torch.stack([accepted.counts, accepted.next_token, tree.sizes], 1)  # [B, 3]
        parts = [columns, accepted.path, tree.tokens, tree.parents, tree.depths]
        facts = torch.cat(parts, 1).tolist()  # one transfer from the device
        n, m = tree.width, accepted.path.shape[1]
        step = self._nothing()
        for row, (count, own, size, *nodes) in zip(self.active, facts):
            path, tokens = nodes[:count], nodes[m : m + n]
            parents, depth = nodes[m + n : m + n + size], max(nodes[m + 2 * n :])
            emitted, reason = self._emit(row, [*(tokens[node] for node in path[1:]), own])
            drafted = min(len(emitted), count - 1)
            self.step_sizes[row].append(len(emitted))
            # drafts behind the path exist, and the output has not ended in the draft
            rejected = path[-1] in parents and len(emitted) == count
            self.stats.count_step(len(emitted), drafted, rejected, size - 1, depth)
            self._put(step, row, emitted, drafted, size - 1, reason)
            if reason:
                self.stats.count_repetition(self.outputs[row], self.step_sizes[row])
        return step

    def _emit(self, row: int, tokens: list[int]) -> tuple[list[int], str | None]:
        """Cuts tokens after the first stop token and notes them; `trim` has kept them within the limit."""
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.stop), None)
        tokens = tokens[:end]
        self.outputs[row] += tokens
        self.left[row] = 0 if end else self.left[row] - len(tokens)
        return tokens, "stop" if end else None if self.left[row] else "length"

    def _nothing(self) -> Step:
        n = len(self.outputs)
        return Step([[] for _ in range(n)], [0] * n, [0] * n, [None] * n)

    @staticmethod
    def _put(
        step: Step, row: int, tokens: list[int], drafted: int, verified: int, reason: str | None
    ) -> None:
        step.tokens[row], step.drafted[row] = tokens, drafted
        step.verified[row], step.finish_reason[row] = verified, reason
