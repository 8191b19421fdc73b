"""Masks over the slots of a cache, for transformers' modules and torch's operators, in targets and drafters
alike. Native forwards need no mask: they take ancestors directly.

Which 4-D mask each architecture takes (`attention_mask`) holds for transformers 5.21 to 5.24.
"""

import torch
import torch.nn.functional as F


def allowed_slots(lengths: torch.Tensor, ancestors: torch.Tensor, view: int) -> torch.Tensor:
    """Return the slots that each node attends to: its row's verified ones, its ancestors and itself.

    Args:
        lengths: verified tokens of each row, int64 [B].
        ancestors: bool [B, n, w] or [n, w]: which of the slots lengths[b] + 0 … w - 1 node i attends to.
        view: number of slots in view: what the longest row needs, max(lengths) + w, or more on a GPU.

    Returns:
        bool [B, n, view]
    """
    n, width = ancestors.shape[-2:]
    ancestors = ancestors.expand(len(lengths), n, width)  # [B, n, w]
    if len(lengths) == 1 and lengths.device.type == "cpu":
        return F.pad(ancestors, (view - width, 0), value=True)
    slots = torch.arange(view, device=lengths.device)  # [view]
    verified = slots < lengths[:, None]  # [B, view]
    allowed = verified[:, None].expand(-1, n, -1).clone()  # [B, n, view]
    after = lengths[:, None] + slots[:width]  # [B, w]
    return allowed.scatter_(2, after[:, None].expand_as(ancestors), ancestors)


def attention_mask(
    allowed: torch.Tensor,
    kv_positions: torch.Tensor,
    positions: torch.Tensor,
    config,
    dtype: torch.dtype,
) -> torch.Tensor | dict[str, torch.Tensor]:
    """Return a mask for an explicit attention pattern, in the form that the model takes: 0 where a query
    attends, else the lowest number of the dtype. Eager attention takes only this kind, and SDPA would convert
    a bool mask to it again in every block.

    Models whose config lists `layer_types` take a dict with one mask per type; the others take one tensor,
    with the sliding window already in it. The window is counted in positions, not slots, because siblings
    share a position.

    Args:
        allowed: bool [B, n, S].
        kv_positions: position of the token in each slot [B, S].
        positions: position of each query [B, n].
    """
    window = getattr(config, "sliding_window", None)
    windowed = allowed
    if window:
        windowed = allowed & (kv_positions[:, None, :] > positions[:, :, None] - window)  # [B, n, S]

    def form(mask: torch.Tensor) -> torch.Tensor:
        additive = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        return additive.masked_fill_(~mask, torch.finfo(dtype).min)[:, None]  # [B, 1, n, S]

    types = getattr(config, "layer_types", None)
    if types:
        return {kind: form(windowed if "sliding" in kind else allowed) for kind in set(types)}
    return form(windowed)
