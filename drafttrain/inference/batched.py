"""Autoregressive decoding of many prompts at once, for regenerating responses with the target.

Rows of one `TreeCache` are filled, decoded in step and refilled as they finish (continuous batching). The
engine knows token ids only; prompts, files and retries are the caller's business.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from drafttrain.inference.sampling import pick_tokens
from drafttrain.target_lm.cache import TreeCache
from drafttrain.target_lm.model import FrozenTarget

BROKEN = -1  # in place of a token id: the logits were not finite


@dataclass
class Request:
    """One prompt. `temperature` 0 is greedy; `seed` fixes the uniform draws of this request alone."""

    id: str
    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


@dataclass
class Completion:
    """Generated ids (the stop token included) and why they end.

    Attributes:
        id: the request's.
        token_ids: empty for the last two reasons.
        finish_reason: "stop", "length", "too_long" (the prompt leaves no room) or "not_finite" (NaN or
            infinite logits).
    """

    id: str
    token_ids: list[int]
    finish_reason: str


class _Rows:
    """Bookkeeping of the sequences that share the cache."""

    def __init__(self, n: int, device: torch.device):
        self.requests: list[Request | None] = [None] * n
        self.emitted: list[list[int]] = [[] for _ in range(n)]
        self.draws: list[torch.Tensor | None] = [None] * n
        self.next_token = torch.zeros(n, dtype=torch.long, device=device)  # [n]
        self.temperature = torch.zeros(n, device=device)  # [n]
        self.top_p = torch.ones(n, device=device)  # [n]

    def free(self) -> list[int]:
        return [row for row, request in enumerate(self.requests) if request is None]

    def place(self, row: int, request: Request) -> None:
        self.requests[row], self.emitted[row] = request, []
        self.temperature[row], self.top_p[row] = request.temperature, request.top_p
        generator = torch.Generator().manual_seed(request.seed)
        self.draws[row] = torch.rand(request.max_new_tokens, generator=generator)

    def free_row(self, row: int) -> None:
        self.requests[row] = None
        self.temperature[row] = 0.0
        self.next_token[row] = 0

    def uniform(self, rows: list[int]) -> torch.Tensor:
        values = [
            float(self.draws[row][len(self.emitted[row])]) if self.requests[row] is not None else 0.0
            for row in rows
        ]
        return torch.tensor(values, device=self.temperature.device)


def generate_batch(
    target: FrozenTarget,
    requests: Iterable[Request | None],
    max_rows: int = 128,
    max_len: int = 2048,
    refill: int = 16,
    on_step: Callable[[int], None] | None = None,
) -> Iterator[Completion]:
    """Decodes requests, `max_rows` at a time, and yields each as it finishes (not in order).

    A request whose prompt leaves no room under `max_len` is yielded at once with no tokens and finish_reason
    "too_long". Requests of similar prompt length should follow each other: the cache's view is as long as its
    longest row.

    Args:
        requests: asked for whenever rows are free, and not before. None says that none is ready until the
            caller has seen another completion (a chat's next turn waits for the reply to the one before).
        max_rows: rows of the cache. The last ones are decoded in a smaller cache.
        max_len: prompt and reply of a row together.
        refill: wait until this many rows are free (or none is busy) before prompts are encoded in their
            place.
        on_step: called with the number of tokens emitted after each forward.
    """
    stop = target.eos_token_ids
    waiting = iter(requests)
    cache = target.new_cache(max_rows, max_len)
    rows = _Rows(max_rows, target.device)
    alone = torch.ones(1, 1, dtype=torch.bool, device=target.device)
    zero = torch.zeros(1, dtype=torch.long, device=target.device)
    exhausted = False
    while True:
        free = rows.free()
        if not exhausted and (len(free) >= refill or len(free) == max_rows):
            batch: list[Request] = []
            while len(batch) < len(free):
                try:
                    request = next(waiting)
                except StopIteration:
                    exhausted = True
                    break
                if request is None:
                    if not batch and len(free) == max_rows:
                        raise RuntimeError("no request is ready, but none is running that it could wait for")
                    break
                if not request.prompt_ids or len(request.prompt_ids) + request.max_new_tokens > max_len:
                    yield Completion(request.id, [], "too_long")
                    continue
                batch.append(request)
            # encode a few prompts at a time: padding stays small and so do the activations
            for start in range(0, len(batch), refill):
                part = batch[start : start + refill]
                places = free[start : start + len(part)]
                _encode_prompts(target, cache, rows, part, places)
                yield from _emit(rows, cache, places, stop)
        busy = [row for row, request in enumerate(rows.requests) if request is not None]
        if not busy:
            if exhausted:
                return
            continue
        if exhausted and len(busy) <= len(rows.requests) // 2:
            rows = _keep(target, cache, rows, busy)
            busy = list(range(len(busy)))
        states = target.forward(cache, rows.next_token[:, None], zero, alone)
        every = list(range(len(rows.requests)))
        cache.commit(zero[None].expand(len(every), 1), torch.ones_like(cache.lengths))
        rows.next_token = _next_tokens(target, states.final[:, -1], rows, every)  # [B]
        if on_step:
            on_step(len(busy))
        yield from _emit(rows, cache, busy, stop)
        idle = torch.tensor([request is None for request in rows.requests], device=target.device)
        cache.lengths = cache.lengths.masked_fill(idle, 0)


def _encode_prompts(
    target: FrozenTarget, cache: TreeCache, rows: _Rows, requests: list[Request], places: list[int]
) -> None:
    """Encodes prompts (right-padded) in a cache of their own and copies it into free rows."""
    lengths = torch.tensor([len(request.prompt_ids) for request in requests], device=target.device)
    n = int(lengths.max())
    tokens = torch.zeros(len(requests), n, dtype=torch.long, device=target.device)  # [r, n]
    for i, request in enumerate(requests):
        tokens[i, : len(request.prompt_ids)] = torch.tensor(request.prompt_ids)
    prompt_cache = target.new_cache(len(requests), n)
    causal = torch.ones(n, n, dtype=torch.bool, device=target.device).tril()
    states = target.forward(prompt_cache, tokens, torch.arange(n, device=target.device), causal)
    cache.allocate(prompt_cache.kv.shape[3], prompt_cache.kv.shape[5])
    index = torch.tensor(places, device=target.device)
    cache.kv[:, :, index, :, :n] = prompt_cache.kv
    cache.lengths = cache.lengths.index_copy(0, index, lengths)
    for row, request in zip(places, requests, strict=True):
        rows.place(row, request)
    last = states.final[torch.arange(len(requests), device=target.device), lengths - 1]  # [r, H]
    rows.next_token[index] = _next_tokens(target, last, rows, places)


def _next_tokens(target: FrozenTarget, final: torch.Tensor, rows: _Rows, places: list[int]) -> torch.Tensor:
    """Next token of each place [r] from its last hidden state [r, H]; -1 where the logits are not finite."""
    logits = target.head(final)  # [r, V]
    tokens = pick_tokens(logits, rows.temperature[places], rows.top_p[places], rows.uniform(places))
    picked = logits.gather(-1, tokens[:, None]).squeeze(-1)  # [r]; NaN passes every comparison of a maximum
    return tokens.masked_fill(~picked.isfinite(), BROKEN)


def _keep(target: FrozenTarget, cache: TreeCache, rows: _Rows, places: list[int]) -> _Rows:
    """Goes on with the given rows of the cache alone; returns their bookkeeping."""
    cache.select_rows(torch.tensor(places, device=target.device))
    kept = _Rows(len(places), target.device)
    for name in ("requests", "emitted", "draws"):
        setattr(kept, name, [getattr(rows, name)[row] for row in places])
    for name in ("next_token", "temperature", "top_p"):
        setattr(kept, name, getattr(rows, name)[places])
    return kept


def _emit(rows: _Rows, cache: TreeCache, places: list[int], stop: set[int]) -> Iterator[Completion]:
    for row, token in zip(places, rows.next_token[places].tolist(), strict=True):
        request, emitted = rows.requests[row], rows.emitted[row]
        if token == BROKEN:
            # Masked slots enter attention with weight 0, and 0 * NaN would break all later requests here.
            cache.kv[:, :, row] = 0
            rows.free_row(row)
            yield Completion(request.id, [], "not_finite")
            continue
        emitted.append(token)
        if token in stop or len(emitted) == request.max_new_tokens:
            rows.free_row(row)
            yield Completion(request.id, list(emitted), "stop" if token in stop else "length")
