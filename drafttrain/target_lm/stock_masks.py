"""Which slots of a cache a token attends to, for transformers' modules and torch's operators: the one place
for targets and drafters. Native forwards take ancestors as they are.

Which 4-D mask each architecture takes (`attention_mask`) holds for transformers 5.21 to 5.24.
"""

import torch
import torch.nn.functional as F


def allowed_slots(lengths: torch.Tensor, ancestors: torch.Tensor, view: int) -> torch.Tensor:
    """Return which slots nodes attend to: all verified ones of their row, their ancestors and themselves.

    Args:
        lengths: verified tokens of each row, int64 [B].
        ancestors: bool [B, n, w] or [n, w]: which of the slots lengths[b] + 0 … w - 1 node i attends to.
        view: number of slots, up to the last of those of the longest row: max(lengths) + w.

    Returns:
        bool [B, n, view]
    """
    n, width = ancestors.shape[-2:]
    ancestors = ancestors.expand(len(lengths), n, width)  # [B, n, w]
    if len(lengths) == 1:
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
    """Return the form of mask a model takes for an explicit pattern of attention: 0 where it may look, else
    the lowest number of its type. Eager attention takes no other; SDPA would make this of a bool mask again
    in every block.

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
