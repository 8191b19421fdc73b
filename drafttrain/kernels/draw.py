"""Draws from the softmax of logits, and the mass that they are divided by."""

import torch
import torch.nn.functional as F

from drafttrain.kernels.build import library

DRAW_BLOCK = 128  # tokens whose mass is summed before one of them is looked for


def draw_logits(
    logits: torch.Tensor, temperature: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens at `uniform`, fp64 [S] in [0, 1), of the cumulative softmax of logits [S, V] over
    temperatures [S] in order of the vocabulary, and the logs of their sums of exponentials, fp64 [S].

    A row with NaN or an infinite maximum gets the token of that.
    """
    if logits.device.type == "cpu" and (native := library()) is not None:
        rows = logits.float().contiguous()  # [S, V]
        factors, shares = (1 / temperature).float(), uniform.double()  # [S]
        sums, tokens = torch.empty_like(shares), torch.empty(len(rows), dtype=torch.long)
        pointers = (one.data_ptr() for one in (factors, shares, sums, tokens))
        native.draws(rows.data_ptr(), *rows.shape, *pointers)
        return tokens, sums
    scaled = logits.float() / temperature[:, None]  # [S, V]
    best, tokens = scaled.max(-1)
    drawn = draw(torch.softmax(scaled, dim=-1), uniform.double())
    return torch.where(best.isfinite(), drawn, tokens), scaled.double().logsumexp(-1)


def draw(probs: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Return the tokens at `uniform`, fp64 [S] in [0, 1), of the cumulative distributions [S, V] in order of
    the vocabulary."""
    blocks = F.pad(probs, (0, -probs.shape[-1] % DRAW_BLOCK)).unflatten(-1, (-1, DRAW_BLOCK))  # [S, n, block]
    masses = blocks.sum(-1, dtype=torch.float64)  # [S, n]
    block, rest = _place(masses, uniform * masses.sum(-1))
    rows = torch.arange(len(probs), device=probs.device)  # [S]
    token, _ = _place(blocks[rows, block].double(), rest)
    return block * DRAW_BLOCK + token


def _place(masses: torch.Tensor, goal: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places [S] at which sums of masses, fp64 [S, n], pass goals [S], and what these exceed the
    sums before by."""
    cumulative = masses.cumsum(-1)
    order = torch.arange(masses.shape[-1], device=masses.device)  # [n]
    # rounding may leave the share of the last one open
    last = torch.where(masses > 0, order, 0).amax(-1, keepdim=True)  # [S, 1]
    place = torch.minimum(torch.searchsorted(cumulative, goal[:, None], right=True), last)  # [S, 1]
    before = (cumulative - masses).gather(-1, place)  # [S, 1]
    return place[:, 0], goal - before[:, 0]
