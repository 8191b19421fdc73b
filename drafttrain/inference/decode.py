"""The one decode loop: propose a tree, verify it with one target forward, keep what is accepted, tell the
proposer.

It knows token ids only; text is `decoder.py`'s business. With `NoProposer` it is plain autoregressive
decoding.
"""

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from drafttrain.errors import UserError
from drafttrain.inference.acceptance import AcceptanceRule, Accepted, accept_greedy
from drafttrain.inference.cache import TreeCache
from drafttrain.inference.proposer import Proposer
from drafttrain.inference.stats import DecodeStats, ModuleClock
from drafttrain.target.frozen import FrozenTarget
from drafttrain.trees.tree import TokenTree

DRAFT_SLOTS = 64  # cache slots for the tree in flight beyond the longest output; more are added as needed


@dataclass
class Step:
    """What one target forward brought, row by row. Rows that had finished before have an empty share.

    Attributes:
        tokens: emitted tokens; the drafted ones come first.
        drafted: how many of them were drafted.
        verified: draft tokens sent to the target.
        finish_reason: "stop" (a stop token was emitted) or "length" in the step in which a row ends, else
            None.
    """

    tokens: list[list[int]]
    drafted: list[int]
    verified: list[int]
    finish_reason: list[str | None]


@torch.no_grad()
def decode(
    target: FrozenTarget,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: Collection[int] | None = None,
    accept: AcceptanceRule = accept_greedy,
    stats: DecodeStats | None = None,
) -> Iterator[Step]:
    """Decodes a batch of prompts; yields a step for the prompts' forward and for each forward after it.

    Every row gives what it would give alone and without a draft (in exact arithmetic; in fp32 up to exact
    ties).

    Args:
        prompts: token ids of each row, not empty.
        max_new_tokens: limit of each row; never exceeded, not even by accepted drafts.
        stop: tokens that end a row. They are emitted, nothing after them is. None: the target's own.
        accept: the rule that compares trees with the target's logits.
        stats: counts and times are added to it.

    Raises:
        UserError: a prompt is empty, it and max_new_tokens exceed the positions of the target, or the target
            gives NaN.
    """
    _check_lengths(target, prompts, max_new_tokens)
    stats = DecodeStats() if stats is None else stats
    rows = _Rows(len(prompts), max_new_tokens, target.eos_token_ids if stop is None else stop, stats)
    stats.prompts += len(prompts)
    stats.prompt_tokens += sum(map(len, prompts))
    clock = ModuleClock(target.device)
    with clock.on(target.base, target.read_head):
        started = time.perf_counter()
        max_len = max(map(len, prompts)) + max_new_tokens
        cache = target.new_cache(len(prompts), max_len + DRAFT_SLOTS)
        state = proposer.new_state(len(prompts), max_len)
        root = _prefill(target, cache, proposer, state, prompts, accept)  # [B]
        step = rows.first_step(root)
        if (left := rows.drop_finished(target.device)) is not None:
            state, root = _keep_rows(left, cache, proposer, state, accept), root[left]
        prefill_seconds = time.perf_counter() - started
        stats.prefill_seconds += prefill_seconds
        stats.seconds += prefill_seconds
        yield step
        while rows.active:
            started, in_model = time.perf_counter(), proposer.model_seconds
            tree = rows.trim(proposer.propose(state, root))
            drafted, modules_before = time.perf_counter(), clock.seconds
            cache.reserve(tree.width)
            states = target.forward(cache, tree.tokens, tree.depths, tree.ancestors())
            accepted = accept(tree, target.head(states.final))
            path, counts, root = accepted.path, accepted.counts, accepted.next_token  # [B, m], [B], [B]
            cache.commit(path, counts)
            committed = tree.tokens.gather(1, path)  # [B, m]
            wide_path = path[:, :, None].expand(-1, -1, states.tapped.shape[-1])  # [B, m, K*H]
            tapped = states.tapped.gather(1, wide_path)  # [B, m, K*H]
            step = rows.step(tree, accepted, committed)
            if (left := rows.drop_finished(target.device)) is not None:
                state = _keep_rows(left, cache, proposer, state, accept)
                committed, tapped, counts, root = (x[left] for x in (committed, tapped, counts, root))
            verified = time.perf_counter()
            if rows.active:
                proposer.observe(state, committed, tapped, counts)
            now = time.perf_counter()
            stats.draft_seconds += drafted - started + now - verified
            stats.draft_model_seconds += proposer.model_seconds - in_model
            stats.verify_seconds += clock.seconds - modules_before
            stats.seconds += now - started
            yield step


def decode_all(
    target: FrozenTarget,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: Collection[int] | None = None,
    accept: AcceptanceRule = accept_greedy,
) -> tuple[list[list[int]], DecodeStats]:
    """Runs `decode` to its end; returns the emitted tokens of each row and the statistics."""
    stats = DecodeStats()
    outputs: list[list[int]] = [[] for _ in prompts]
    for step in decode(target, proposer, prompts, max_new_tokens, stop, accept, stats):
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


def _prefill(
    target: FrozenTarget,
    cache: TreeCache,
    proposer: Proposer,
    state: object,
    prompts: Sequence[Sequence[int]],
    accept: AcceptanceRule,
) -> torch.Tensor:
    """Encodes the prompts as chains, padded on the right, and returns the first token of each row [B]."""
    device = target.device
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
    proposer.observe(state, tokens, states.tapped, lengths)
    # the last prompt token plays the root of a tree without drafts
    return accept(TokenTree.root_only(tokens[rows, lengths - 1]), logits[:, None]).next_token


def _keep_rows(
    left: torch.Tensor, cache: TreeCache, proposer: Proposer, state: object, accept: AcceptanceRule
) -> object:
    """Goes on with some rows alone, int64 [b]: the others have ended, and their forwards would be for
    nothing. Returns the proposer's state of them."""
    cache.keep_rows(left)
    if hasattr(accept, "keep_rows"):
        accept.keep_rows(left)
    return proposer.keep_rows(state, left)


class _Rows:
    """What has been emitted in each row, and which rows go on.

    Attributes:
        active: numbers of the rows that still take part, in the order of the batch.
    """

    def __init__(self, batch: int, max_new_tokens: int, stop: Collection[int], stats: DecodeStats):
        self.stop, self.stats = frozenset(stop), stats
        self.left = [max_new_tokens] * batch  # tokens that each row may still emit; 0 once it has finished
        self.active = list(range(batch))
        self.outputs: list[list[int]] = [[] for _ in range(batch)]
        self.step_sizes: list[list[int]] = [[] for _ in range(batch)]

    def drop_finished(self, device: torch.device) -> torch.Tensor | None:
        """Which rows of the present batch go on, int64 [b]; None if all do, or none."""
        left = [place for place, row in enumerate(self.active) if self.left[row]]
        if len(left) == len(self.active):
            return None
        self.active = [self.active[place] for place in left]
        return torch.tensor(left, device=device) if left else None

    def trim(self, tree: TokenTree) -> TokenTree:
        """Drops nodes that no row could emit: a tree of depth d emits up to d + 1 tokens.

        So no node ever lies beyond the last position that plain decoding would use.
        """
        left = [self.left[row] for row in self.active]
        if int(tree.depths.max()) < min(left):
            return tree
        return tree.select(tree.depths < torch.tensor(left, device=tree.depths.device)[:, None])

    def first_step(self, tokens: torch.Tensor) -> Step:
        """Emits the first token of each row, [B]."""
        step = self._nothing()
        for row, token in enumerate(tokens.tolist()):
            emitted, reason = self._emit(row, [token])
            self.stats.new_tokens += 1
            self._put(step, row, emitted, 0, 0, reason)
        return step

    def step(self, tree: TokenTree, accepted: Accepted, committed: torch.Tensor) -> Step:
        """Emits each accepted path [B, m] (without its root, which is emitted already) and the target's own
        token."""
        last = accepted.path.gather(1, accepted.counts[:, None] - 1)  # [B, 1]
        refused = ((tree.parents == last) & tree.valid).any(1)  # [B] drafts behind the path exist
        columns = [accepted.counts, accepted.next_token, refused, tree.sizes, tree.depths.amax(1)]
        facts = torch.cat([torch.stack(columns, 1), committed], 1).tolist()  # one transfer from the device
        step = self._nothing()
        for row, (count, own, refused_here, size, depth, _, *drafts) in zip(self.active, facts):
            emitted, reason = self._emit(row, [*drafts[: count - 1], own])
            drafted = min(len(emitted), count - 1)
            self.step_sizes[row].append(len(emitted))
            rejected = bool(refused_here) and len(emitted) == count  # not so if the output ended in the draft
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
