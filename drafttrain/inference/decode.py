"""The decode loop: encode prompts, then propose trees, verify them with one target forward and update the
proposer until every output has ended.

It works on token ids only; `decoder.py` handles text. With `NoProposer` it is plain autoregressive
decoding. `decode` takes a list of prompts; `decode_requests`, which it is built on, takes requests as they
come.
"""

import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import get_ident

import torch

from drafttrain.inference.acceptance import AcceptanceRule, Accepted, rule_for, sampling_rule
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.proposer import Proposer
from drafttrain.inference.session import NOT_FINITE, Session, prefill, propose, update, verify
from drafttrain.inference.stats import DecodeStats, ModuleClock
from drafttrain.target_lm.model import FrozenTarget
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError

MOST_ROWS = 64  # prompts decoded at a time unless the caller sets a limit: limits the memory of a long list
PREFILL_TOKENS = 1024  # of prompts in one prefill, padding included: limits the memory of activations


@dataclass
class Request:
    """A prompt that is to be continued.

    Attributes:
        prompt_ids: its tokens.
        max_new_tokens: limit of the output, which accepted drafts never exceed either. `max_tokens` of
            `sampling` replaces it, if set.
        sampling: how its tokens are drawn; greedy by default.
        id: the caller's name for it.
    """

    prompt_ids: Sequence[int]
    max_new_tokens: int
    sampling: SamplingParams = SamplingParams()
    id: str = ""

    def __post_init__(self) -> None:
        self.max_new_tokens = self.sampling.max_tokens or self.max_new_tokens


@dataclass(eq=False)
class Row:
    """A request that is being decoded, and the outcome of its last forward.

    Attributes:
        number: index of the request in the order in which requests were taken.
        output: its tokens so far.
        tokens: those that the last forward emitted; accepted draft tokens come first.
        drafted, rejected: how many of `tokens` were drafted, and whether a draft token after those was
            rejected.
        verified: draft tokens of this row that the last forward verified.
        finish_reason: None until the output ends; then "stop" (a stop token was emitted), "length" or
            "not_finite" (NaN or infinite logits; `output` ends before them). A caller may set it to end one.
        step_sizes: how many tokens each forward after the prefill emitted.
    """

    number: int
    request: Request
    output: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    drafted: int = 0
    rejected: bool = False
    verified: int = 0
    finish_reason: str | None = None
    step_sizes: list[int] = field(default_factory=list)

    @property
    def left(self) -> int:
        """Return how many tokens it may still emit."""
        return self.request.max_new_tokens - len(self.output)

    def add(self, tokens: list[int], stop: Collection[int]) -> None:
        """Emit the tokens up to and including the first in `stop`; callers keep them within the limit."""
        end = next((i for i, token in enumerate(tokens, 1) if token in stop and token != NOT_FINITE), None)
        self.tokens = tokens[:end]
        if end:
            self.finish_reason = "stop"
        elif self.tokens[-1] == NOT_FINITE:
            self.finish_reason = "not_finite"
            self.tokens.pop()
        self.output += self.tokens
        if self.finish_reason is None and not self.left:
            self.finish_reason = "length"


@dataclass
class Step:
    """Tokens that one target forward emitted, by prompt; empty for prompts that took no part in it.

    Attributes:
        tokens: emitted tokens; the drafted ones come first.
        drafted: how many of them were drafted.
        verified: draft tokens sent to the target.
        finish_reason: "stop" (a stop token was emitted) or "length" in the step in which an output ends, else
            None.
        rows: the prompts that took part. To end an output, set its row's `finish_reason` before the next
            step.
    """

    tokens: list[list[int]]
    drafted: list[int]
    verified: list[int]
    finish_reason: list[str | None]
    rows: list[Row]

    @classmethod
    def of(cls, prompts: int, rows: list[Row]) -> "Step":
        """Build the step of `prompts` prompts from the rows that took part."""
        step = cls([[] for _ in range(prompts)], [0] * prompts, [0] * prompts, [None] * prompts, rows)
        for row in rows:
            step.tokens[row.number], step.drafted[row.number] = row.tokens, row.drafted
            step.verified[row.number], step.finish_reason[row.number] = row.verified, row.finish_reason
        return step


@torch.no_grad()
def decode(
    target: FrozenTarget,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: Collection[int] | None = None,
    accept: AcceptanceRule | None = None,
    stats: DecodeStats | None = None,
    max_rows: int | None = None,
    sampling: Sequence[SamplingParams] | None = None,
) -> Iterator[Step]:
    """Decode prompts and yield a step for each target forward, prefills included.

    Every prompt gets the output that it would get alone and without drafts (in exact arithmetic; in fp32 up
    to exact ties).

    Args:
        prompts: token ids of each, not empty.
        max_new_tokens: limit of each output, which accepted drafts never exceed either.
        stop: tokens that end an output. They are emitted, nothing after them is. None: the target's own.
        accept: the acceptance rule. None: the one that is exact for `sampling`.
        stats: counts and times are added to it.
        max_rows: prompts decoded at a time; when one ends, the next takes its place. None: `MOST_ROWS`.
        sampling: how the tokens of each prompt are drawn. None: greedily.

    Raises:
        UserError: a prompt is empty, it and max_new_tokens exceed the positions of the target, max_rows is
            below 1, or the target gives NaN or infinite logits.
    """
    if max_rows is not None and max_rows < 1:
        raise UserError(f"max_rows: must be at least 1, got {max_rows}")
    sampling = [SamplingParams()] * len(prompts) if sampling is None else sampling
    requests = [
        Request(*pair) for pair in zip(prompts, [max_new_tokens] * len(prompts), sampling, strict=True)
    ]
    for number, request in enumerate(requests):
        check_request(target, request, number)
    accept = rule_for(sampling, proposer.draws) if accept is None else accept
    max_len = max((len(request.prompt_ids) + request.max_new_tokens for request in requests), default=0)
    batch = max_rows or min(len(prompts), MOST_ROWS)
    for rows in decode_requests(target, proposer, requests, batch, max_len, stop, accept, stats):
        if any(row.finish_reason == "not_finite" for row in rows):
            raise UserError(
                f"{target.name}: logits must be finite, got NaN or infinity in {target.dtype}; load it in "
                "another dtype"
            )
        yield Step.of(len(prompts), rows)


@torch.no_grad()
def decode_requests(
    target: FrozenTarget,
    proposer: Proposer,
    requests: Iterable[Request | None],
    max_rows: int,
    max_len: int,
    stop: Collection[int] | None = None,
    accept: AcceptanceRule | None = None,
    stats: DecodeStats | None = None,
    refill: int = 1,
) -> Iterator[list[Row]]:
    """Decode requests as they come by continuous batching; yield the rows of each target forward.

    A request's output does not depend on its batch. Requests of similar length should follow each other: the
    view of the KV cache is as long as its longest row.

    Args:
        requests: read only when rows are free. An item None: no request is ready until the caller has seen
            another output end (a chat's next turn waits for the answer to the one before).
        max_rows: requests decoded at a time.
        max_len: tokens per row for which slots are allocated at once, prompt included; more cost time.
        stop: tokens that end an output. They are emitted, nothing after them is. None: the target's own.
        accept: the acceptance rule. None: the one that is exact for each request's `sampling`.
        stats: counts and times are added to it.
        refill: rows that must be free (or all of them) before the next prefill.

    Raises:
        UserError: a prompt is empty, or it and its max_new_tokens exceed the positions of the target.
        RuntimeError: an item is None although no request is being decoded.
    """
    stop = frozenset(target.eos_token_ids if stop is None else stop)
    stats = DecodeStats() if stats is None else stats
    by_request = sampling_rule([], proposer.draws) if accept is None else None
    rule, waiting = accept or by_request, iter(requests)
    loop = _Loop(target, proposer, waiting, max_rows, max_len, stop, rule, stats, refill, by_request)
    with loop.clock.on(*target.timed_modules):
        while True:
            with target.own_cores():  # the caller has all threads
                rows = loop.forward()
            if not rows:
                return
            yield rows


@dataclass
class _Loop:
    """The state of `decode_requests`, whose arguments come first.

    Attributes:
        by_request: the acceptance rule if it needs the sampling parameters of each request, else None.
        rows: in the order of the session's rows.
        session: None if there are no rows.
        chunks: rows that wait for their prefill, grouped by forward.
        taken: number of requests taken so far.
        exhausted: True once `requests` has ended.
    """

    target: FrozenTarget
    proposer: Proposer
    requests: Iterator[Request | None]
    max_rows: int
    max_len: int
    stop: Collection[int]
    accept: AcceptanceRule
    stats: DecodeStats
    refill: int
    by_request: AcceptanceRule | None
    rows: list[Row] = field(default_factory=list)
    session: Session | None = None
    chunks: deque[list[Row]] = field(default_factory=deque)
    taken: int = 0
    exhausted: bool = False

    def __post_init__(self) -> None:
        self.clock = ModuleClock(self.target.device)

    def forward(self) -> list[Row]:
        """Run the target once; return the rows that took part, none if nothing is left to do."""
        self.clock.thread = get_ident()
        self._drop_ended()
        if not self.chunks:
            self.chunks.extend(_chunks(self._take()))
        if self.chunks:
            return self._encode(self.chunks.popleft())
        return self._step() if self.rows else []

    def _take(self) -> list[Row]:
        """Take the requests that are ready if enough rows are free for them."""
        free, taken = self.max_rows - len(self.rows), []
        if self.rows and free < self.refill:
            return []
        while len(taken) < free and not self.exhausted:
            try:
                request = next(self.requests)
            except StopIteration:
                self.exhausted = True
                break
            if request is None:
                if not taken and not self.rows:
                    raise RuntimeError("no request is ready, but none is running that it could wait for")
                break
            check_request(self.target, request, self.taken)
            if self.by_request is not None:
                self.by_request.add(request.sampling)
            taken.append(Row(self.taken, request))
            self.taken += 1
        return taken

    def _encode(self, rows: list[Row]) -> list[Row]:
        """Prefill new rows, each of which emits its first token."""
        started = time.perf_counter()
        self._set_active(rows)
        prompts = [row.request.prompt_ids for row in rows]
        # rows that join others are copied into the session's cache, which has the room for outputs
        room = max(map(len, prompts)) if self.session else self.max_len
        encoded = prefill(self.target, self.proposer, prompts, room, self.accept)
        for row, token in zip(rows, encoded.root.tolist()):
            row.add([token], self.stop)
            self.stats.prompts += 1
            self.stats.prompt_tokens += len(row.request.prompt_ids)
            self.stats.new_tokens += len(row.tokens)
        if self.session:
            self.session.append_rows(encoded)
        else:
            self.session = encoded
            encoded.cache.reserve_rows(self.max_rows)
        self.rows = self.rows + rows
        self.stats.prefill_seconds += time.perf_counter() - started
        self.stats.seconds += time.perf_counter() - started
        return rows

    def _step(self) -> list[Row]:
        """Propose trees, verify them with one forward, and update the proposer."""
        started = time.perf_counter()
        session, stats, proposer = self.session, self.stats, self.proposer
        self._set_active(self.rows)
        in_model = proposer.model_seconds
        tree = trim(propose(session), self.rows)
        drafted, modules_before = time.perf_counter(), self.clock.seconds
        verified = verify(session, tree, self.accept)
        emit(self.rows, tree, verified.accepted, session.root, self.stop, stats)
        verified_at = time.perf_counter()
        if proposer.needs_last_update or any(row.finish_reason is None for row in self.rows):
            update(session, verified)
        updated = time.perf_counter()
        proposer.note_step(len(self.rows), sum(len(row.tokens) for row in self.rows), updated - started)
        stats.draft_seconds += drafted - started + updated - verified_at
        stats.draft_model_seconds += proposer.model_seconds - in_model
        stats.verify_seconds += self.clock.seconds - modules_before
        stats.seconds += updated - started
        return self.rows

    def _set_active(self, rows: list[Row]) -> None:
        self.accept.set_active([row.number for row in rows])
        self.proposer.set_active(
            [row.request.sampling.seed for row in rows], [len(row.output) for row in rows]
        )

    def _drop_ended(self) -> None:
        """Drop the rows that have ended. The last rows move into their places, so that few are copied."""
        started = time.perf_counter()
        going = [place for place, row in enumerate(self.rows) if row.finish_reason is None]
        if len(going) == len(self.rows):
            return
        moving = (place for place in going if place >= len(going))
        places = [next(moving) if self.rows[i].finish_reason else i for i in range(len(going))]
        self.rows = [self.rows[place] for place in places]
        if self.rows:
            self.session.select_rows(torch.tensor(places, device=self.session.root.device))
        else:
            self.session = None
        self.stats.seconds += time.perf_counter() - started


def trim(tree: TokenTree, rows: Sequence[Row]) -> TokenTree:
    """Drop nodes that are too deep for the limits of the rows: a tree of depth d emits up to d + 1 tokens.

    So no node is ever beyond the last position that plain decoding would use.
    """
    if tree.width == 1:
        return tree
    left = [row.left for row in rows]
    if tree.width <= min(left) or int(tree.depths.max()) < min(left):
        return tree
    most = torch.tensor(left).to(tree.depths.device, non_blocking=True)  # [B]
    return tree.select(tree.depths < most[:, None])


def emit(
    rows: Sequence[Row],
    tree: TokenTree,
    accepted: Accepted,
    root: torch.Tensor,
    stop: Collection[int],
    stats: DecodeStats,
) -> None:
    """Emit each row's accepted path, without the root, which is emitted already, and the target's token.

    Args:
        tree: the trees that were verified.
        root: the target's own tokens, int64 [B], which the next trees start from.
    """
    if tree.width == 1:
        for row, own in zip(rows, root.tolist()):
            _count(row, [own], 0, False, 0, 0, stop, stats)
        return
    columns = torch.stack([accepted.counts, root, tree.sizes], 1)  # [B, 3]
    parts = [columns, accepted.path, tree.tokens, tree.parents, tree.depths]
    facts = torch.cat(parts, 1).tolist()  # one transfer from the device
    n, m = tree.width, accepted.path.shape[1]
    for row, (count, own, size, *nodes) in zip(rows, facts):
        path, tokens = nodes[:count], nodes[m : m + n]
        parents, depth = nodes[m + n : m + n + size], max(nodes[m + 2 * n :])
        emitted = [*(tokens[node] for node in path[1:]), own]
        _count(row, emitted, count - 1, path[-1] in parents, size - 1, depth, stop, stats)


def _count(
    row: Row,
    tokens: list[int],
    drafted: int,
    has_children: bool,
    verified: int,
    depth: int,
    stop: Collection[int],
    stats: DecodeStats,
) -> None:
    """Emit tokens of a row and add its share of the step to the statistics.

    Args:
        drafted: how many of the tokens were drafted.
        has_children: whether the last of those has children in the tree.
        verified: draft tokens in its tree.
        depth: of its tree.
    """
    row.add(tokens, stop)
    emitted = len(row.tokens)
    row.drafted, row.verified = min(emitted, drafted), verified
    # draft tokens were rejected if the path has children and the output has not ended on the path
    row.rejected = has_children and emitted == len(tokens)
    stats.count_step(emitted, row.drafted, row.rejected, verified, depth)
    if emitted:
        row.step_sizes.append(emitted)
    if row.finish_reason:
        stats.count_repetition(row.output, row.step_sizes)


def decode_all(
    target: FrozenTarget,
    proposer: Proposer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop: Collection[int] | None = None,
    accept: AcceptanceRule | None = None,
    max_rows: int | None = None,
    sampling: Sequence[SamplingParams] | None = None,
) -> tuple[list[list[int]], DecodeStats]:
    """Run `decode` to its end; return the emitted tokens of each prompt and the statistics."""
    stats = DecodeStats()
    outputs: list[list[int]] = [[] for _ in prompts]
    for step in decode(target, proposer, prompts, max_new_tokens, stop, accept, stats, max_rows, sampling):
        for output, tokens in zip(outputs, step.tokens):
            output += tokens
    return outputs, stats


def check_request(target: FrozenTarget, request: Request, number: int) -> None:
    """Validate that a request has a prompt, room for new tokens, and target positions for both.

    Raises:
        UserError: names the prompt by its number.
    """
    if request.max_new_tokens < 1:
        raise UserError(f"max_new_tokens: must be at least 1, got {request.max_new_tokens}")
    if not len(request.prompt_ids):
        raise UserError(f"prompt {number}: must have at least one token, got none")
    target.check_length(request.prompt_ids, request.max_new_tokens, f"prompt {number}")


def _chunks(rows: Sequence[Row]) -> list[list[Row]]:
    """Group rows for prefills within `PREFILL_TOKENS`, or of one row, by length of prompt, to pad little."""
    chunks: list[list[Row]] = [[]]
    for row in sorted(rows, key=lambda row: len(row.request.prompt_ids)):
        if chunks[-1] and (len(chunks[-1]) + 1) * len(row.request.prompt_ids) > PREFILL_TOKENS:
            chunks.append([])
        chunks[-1].append(row)
    return [sorted(chunk, key=lambda row: row.number) for chunk in chunks if chunk]
