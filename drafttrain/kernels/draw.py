"""Random draws from the softmax of logits, and the logarithm of its normalizer."""

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from drafttrain.kernels.build import library

DRAW_BLOCK = 128  # tokens per block: first the block is found by its mass, then the token in it


def uniforms(seeds: Sequence[int], positions: Sequence[int], count: int) -> np.ndarray:
    """Return the first `count` uniform numbers of each seed and position, fp64 [seeds, positions, count]; the
    same as `sampling.uniform`."""
    first = np.array([seed % 2**64 for seed in seeds], np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    own = (np.asarray(positions, np.uint64) + np.uint64(1)) * np.uint64(0xD1B54A32D192ED03)
    state = first[:, None, None] + own[:, None]  # [seeds, positions, 1]
    state = state + np.arange(count, dtype=np.uint64) * np.uint64(0x8CB92BA72F3D8DD7)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = (state ^ state >> np.uint64(shift)) * np.uint64(factor)
    return ((state ^ state >> np.uint64(31)) >> np.uint64(11)) / 2**53


def reject_drafts(
    logits: torch.Tensor,
    tree: Sequence[torch.Tensor],
    drawn_from: Sequence[torch.Tensor] | None,
    temperatures: Sequence[float],
    seeds: Sequence[int],
    positions: Sequence[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return the paths that `RejectionSampling` accepts, int64 [B, m], their lengths and the tokens after
    them, int64 [B], for logits of the target [B, n, V] without top-k or top-p; None without native calls.

    Args:
        tree: tokens, parents, int64 [B, n], and sizes, int64 [B].
        drawn_from: probabilities, fp32, and ids, int64, [B, n, K]. None: there are no drafts.
        temperatures, seeds, positions: one per row; the position is that of the row's next token.
    """
    if logits.device.type != "cpu" or library() is None:
        return None
    batch, n, vocabulary = logits.shape
    probs, ids = drawn_from or [torch.empty(batch, n, 0, dtype=dtype) for dtype in (torch.float, torch.long)]
    held = [one.contiguous() for one in (logits.float(), *tree, ids, probs)]
    rows, tokens, parents, sizes, ids, probs = (one.data_ptr() for one in held)
    path, counts, after = (torch.empty(size, dtype=torch.long) for size in ((batch, n), batch, batch))
    library().reject_drafts(
        *(rows, batch, n, vocabulary, held[4].shape[2], parents, tokens, sizes, ids, probs),
        (ctypes.c_double * batch)(*temperatures),
        (ctypes.c_uint64 * batch)(*(seed % 2**64 for seed in seeds)),
        (ctypes.c_int64 * batch)(*positions),
        *(one.data_ptr() for one in (path, counts, after)),
    )
    # not `max` of the tensor: after a forward has swept the caches another operator takes 50 us
    return path[:, : max(counts.tolist())], counts, after


def draw_logits(
    logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw tokens [S] from the softmax of logits [S, V] / temperatures [S] by inverting its cumulative sum in
    order of the vocabulary at `uniform`, fp64 [S] in [0, 1). Also return the logs of the sums of exponentials
    of the scaled logits, fp64 [S]. A row with NaN or an infinite maximum gets the token of that value.
    """
    if logits.device.type == "cpu" and (native := library()) is not None:
        rows = logits.float().contiguous()  # [S, V]
        factors, shares = (1 / temperature).float(), uniform.double()  # [S]
        sums, tokens = torch.empty_like(shares), torch.empty(len(rows), dtype=torch.long)
        pointers = (one.data_ptr() for one in (factors, shares, sums, tokens))
        native.draws(rows.data_ptr(), *rows.shape, *pointers)
        return tokens, sums
    factors = (1 / temperature).float()  # [S]
    best, tokens = logits.float().max(-1)
    # from the maximum, as products with it would be rounded by more than 1 at very low temperatures
    scaled = (logits.float() - best[:, None]) * factors[:, None]  # [S, V]
    drawn = draw(torch.softmax(scaled, dim=-1), uniform.double())
    log_mass = scaled.double().logsumexp(-1) + best.double() * factors.double()
    return torch.where(best.isfinite(), drawn, tokens), log_mass


def draw(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw tokens [S] from distributions [S, V] by inverting their cumulative sums in order of the vocabulary
    at `uniform`, fp64 [S] in [0, 1)."""
    blocks = F.pad(probs, (0, -probs.shape[-1] % DRAW_BLOCK)).unflatten(-1, (-1, DRAW_BLOCK))  # [S, n, block]
    masses = blocks.sum(-1, dtype=torch.float64)  # [S, n]
    block, rest = _place(masses, uniform * masses.sum(-1))
    rows = torch.arange(len(probs), device=probs.device)  # [S]
    token, _ = _place(blocks[rows, block].double(), rest)
    return block * DRAW_BLOCK + token


def _place(masses: torch.Tensor, goal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices [S] at which cumulative sums of masses, fp64 [S, n], exceed the goals [S], and the
    goals minus the sums before these indices."""
    cumulative = masses.cumsum(-1)
    order = torch.arange(masses.shape[-1], device=masses.device)  # [n]
    # rounding may leave the total below a goal: then the last one with a mass is taken
    last = torch.where(masses > 0, order, 0).amax(-1, keepdim=True)  # [S, 1]
    place = torch.minimum(torch.searchsorted(cumulative, goal[:, None], right=True), last)  # [S, 1]
    before = (cumulative - masses).gather(-1, place)  # [S, 1]
    return place[:, 0], goal - before[:, 0]
