"""Draws from the target's distribution: temperature, top-k, top-p, and reproducible uniform numbers.

A number depends on a seed and a position of the output alone; neither the rest of a batch nor the number of
tokens per forward changes it. So the same seed gives the same text with and without drafts, alone and in a
batch, in decoding and in regeneration.
"""

from collections.abc import Sequence

import numpy as np
import torch

from drafttrain.inference.params import SamplingParams

NUCLEUS = 256  # candidates looked at first; rows whose nucleus is wider are sorted whole
NO_LIMIT = 2**62  # top_k of outputs without one
_MASK = 2**64 - 1


def uniform(seed: int, position: int, number: int = 0) -> float:
    """Return a number in [0, 1) that a seed and a position of the output determine (SplitMix64, Steele et al.
    2014).

    Args:
        number: index among the numbers of the position; number 0 draws its token.
    """
    state = seed * 0x9E3779B97F4A7C15 + 0xD1B54A32D192ED03 * (position + 1) + 0x8CB92BA72F3D8DD7 * number
    state &= _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = ((state ^ (state >> shift)) * factor) & _MASK
    return ((state ^ (state >> 31)) >> 11) / 2**53


def pick_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    top_k: torch.Tensor | None = None,
) -> torch.Tensor:
    """Choose each row's most probable token, or draw one from its nucleus by inverting the cumulative
    distribution. A row with NaN or an infinite maximum gets the token with it.

    Args:
        logits: [B, V].
        temperature, top_p: [B], on the CPU, so that a GPU is not waited for.
        uniform: in [0, 1), ignored where the temperature is 0, [B].
        top_k: int64 [B], on the CPU; None: no limit.

    Returns:
        token ids [B]
    """
    from drafttrain.kernels.draw import draw_logits  # greedy decoding does not need it

    limit = torch.full_like(temperature, logits.shape[-1]) if top_k is None else top_k  # [B]
    sampled, cut = temperature > 0, (limit < logits.shape[-1]) | (top_p < 1)  # [B]
    if bool((sampled & ~cut).all()):  # no need to sort
        return draw_logits(logits, temperature.to(logits.device, non_blocking=True), uniform)[0]
    best, tokens = logits.max(-1)  # [B]; max, because argmax of bf16 takes 4 times as long on a CPU

    def of(rows: torch.Tensor, *values: torch.Tensor) -> list[torch.Tensor]:
        """Return rows, int64 [S], on the logits' device, and their values."""
        there = rows.to(logits.device, non_blocking=True)  # [S]
        own = (value[there if value.device == there.device else rows] for value in values)
        return [there, *(value.to(logits.device, non_blocking=True) for value in own)]

    if len(rows := (sampled & ~cut).nonzero()[:, 0]):  # [S]
        rows, *values = of(rows, logits, temperature, uniform)
        tokens[rows] = draw_logits(*values)[0]
    if len(rows := (sampled & cut).nonzero()[:, 0]):  # [S]
        rows, *values = of(rows, logits, temperature, top_p, uniform, limit)
        tokens[rows] = torch.where(best[rows].isfinite(), _draw_cut(*values), tokens[rows])
    return tokens


def _draw_cut(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    top_k: torch.Tensor,
) -> torch.Tensor:
    """Draw tokens [S], by descending probability, from what top-k and top-p leave of logits [S, V]."""
    probs = torch.softmax(logits.float() / temperature[:, None], dim=-1)  # [S, V]
    vocabulary, limited = probs.shape[-1], top_k < probs.shape[-1]
    top, ids = probs.topk(min(NUCLEUS, vocabulary), dim=-1)  # [S, k]
    # rows whose first candidates do not reach top-p or do not include all of the top-k
    wide = ((top.sum(-1) < top_p) | limited) & (top_k > top.shape[-1])  # [S]
    chosen = _invert(top, ids, top_p, uniform, top_k, limited)
    if wide.any() and vocabulary > top.shape[-1]:
        top, ids = probs[wide].sort(dim=-1, descending=True)
        chosen[wide] = _invert(top, ids, top_p[wide], uniform[wide], top_k[wide], limited[wide])
    return chosen


def _invert(
    top: torch.Tensor,
    ids: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    top_k: torch.Tensor,
    limited: torch.Tensor,
) -> torch.Tensor:
    """Return tokens [S] by inverting, at `uniform` [S], the cumulative distribution of what top-k and top-p
    keep of the descending probabilities `top` [S, k]."""
    # top-k first, then top-p of what it leaves, as transformers does
    within = torch.arange(top.shape[-1], device=top.device) < top_k[:, None]  # [S, k]
    top = torch.where(within, top, 0.0)
    whole = torch.where(limited, top.sum(-1), 1.0)  # [S]
    before = top.cumsum(-1) - top  # [S, k] mass in front of each candidate
    kept = torch.where(before < (top_p * whole)[:, None], top, 0.0)
    cumulative = kept.cumsum(-1)
    goal = uniform[:, None] * cumulative[:, -1:]  # [S, 1]
    index = (cumulative <= goal).sum(-1, keepdim=True)  # [S, 1]
    # in fp32 a number just below 1 may reach the end; NaN keeps nothing
    last = (kept.count_nonzero(-1)[:, None] - 1).clamp(min=0)  # [S, 1]
    index = torch.minimum(index, last)
    return ids.gather(-1, index).squeeze(-1)


def is_cut(params: SamplingParams) -> bool:
    """Return whether top-k or top-p leaves tokens out."""
    return params.top_k is not None or params.top_p < 1


def kept_tokens(logits: torch.Tensor, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Return the distribution that `pick_tokens` draws from, by logits [V]: the tokens that are kept, int64
    [m], ascending, and their probabilities, fp64 [m]; these are NaN if a logit is NaN or the largest one
    infinite."""
    if params.temperature == 0:
        best, token = logits.max(0)
        return np.array([int(token)]), np.array([1.0 if best.isfinite() else np.nan])
    probs = torch.softmax(logits.double() / params.temperature, dim=-1)  # [V]
    limit = min(params.top_k or len(probs), len(probs))
    for size in (NUCLEUS, limit):  # the first are enough for most rows
        best, tokens = (part.numpy(force=True) for part in probs.topk(min(size, limit)))  # [k]
        if len(best) == limit or (limit == len(probs) and not best.sum() < params.top_p):
            break
    if not np.isfinite(best[0]):
        return tokens[:1], best[:1]
    whole = best.sum() if limit < len(probs) else 1.0
    kept = best.cumsum() - best < params.top_p * whole  # [k]: the mass in front of each
    best, tokens = best[kept], tokens[kept]  # [m]
    order = tokens.argsort()
    return tokens[order], best[order] / best.sum()


class Sampler:
    """Draws the tokens of a batch of outputs, each with its parameters.

    Attributes:
        whole: True if all outputs are drawn, none greedily, from the whole vocabulary.
    """

    def __init__(self, params: Sequence[SamplingParams]):
        self.params = list(params)
        self.whole = all(one.temperature > 0 and not is_cut(one) for one in self.params)
        # named, as another thread's `from_pretrained` changes the default for all
        dtype = torch.float
        self.temperature = torch.tensor([one.temperature for one in self.params], dtype=dtype)  # [B]
        self.top_p = torch.tensor([one.top_p for one in self.params], dtype=dtype)  # [B]
        self.top_k = torch.tensor([one.top_k or NO_LIMIT for one in self.params], dtype=torch.long)  # [B]

    def pick(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return tokens [B, n] from logits [B, n, V], for these positions of the outputs, int64 [B, n]."""
        from drafttrain.kernels.draw import draw_logits  # greedy decoding does not need it

        batch, n, vocabulary = logits.shape
        numbers = [
            uniform(params.seed, position) if params.temperature else 0.0
            for params, row in zip(self.params, positions.tolist(), strict=True)
            for position in row
        ]
        shares = torch.tensor(numbers, dtype=torch.float64).to(logits.device, non_blocking=True)  # [B * n]

        def each(values: torch.Tensor) -> torch.Tensor:
            return values.repeat_interleave(n)  # [B * n]

        flat, temperature = logits.flatten(0, 1), each(self.temperature)
        if self.whole:  # a few operators less than below, for each token of plain sampling
            tokens = draw_logits(flat, temperature.to(flat.device, non_blocking=True), shares)[0]
        else:
            top_k = each(self.top_k.clamp(max=vocabulary))
            tokens = pick_tokens(flat, temperature, each(self.top_p), shares, top_k)
        return tokens.view(batch, n)
