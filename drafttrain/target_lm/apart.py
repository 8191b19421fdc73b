"""Forward of a target's own modules over trees of several caches, in one packed row without padding."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from drafttrain.target_lm.attention import IGNORED, grouped_attention, separate_caches
from drafttrain.target_lm.cache import CACHE_ARGUMENT, TreeCache
from drafttrain.target_lm.stock_masks import allowed_slots

Part = tuple[TreeCache, torch.Tensor, torch.Tensor, torch.Tensor]  # cache; slots, positions, ancestors


def run_apart(
    base: PreTrainedModel,
    tokens: torch.Tensor,
    parts: Sequence[Part],
    views: Sequence[int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the last hidden states [1, N, H] of the nodes of several trees, tokens [N], each after its own
    cache, of a language model without its head.

    Args:
        parts: of each tree its cache, whose slots are open, slots and positions [B, n], and ancestors.
        views: slots of each cache that its nodes can see.
        dtype: of the model's states.
    """
    allowed = [allowed_slots(cache.lengths, seen, view) for (cache, *_, seen), view in zip(parts, views)]
    with over_caches([cache for cache, *_ in parts], allowed, dtype) as joined:
        out = base(
            input_ids=tokens[None],
            attention_mask=IGNORED.to(tokens.device),
            position_ids=torch.cat([positions.flatten() for _, _, positions, _ in parts])[None],
            use_cache=True,
            **{CACHE_ARGUMENT: joined},
        )
    return out.last_hidden_state


class _Apart(CacheLayerMixin):
    """Empty layer in place of several caches' layers: the attention function writes and reads those."""

    is_sliding, is_compileable, is_initialized = False, True, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Do nothing: each cache allocates its own buffer."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length


@contextmanager
def over_caches(
    caches: Sequence[TreeCache], allowed: Sequence[torch.Tensor], dtype: torch.dtype
) -> Iterator[Cache]:
    """Let each stretch of one packed row attend to its own cache, inside the block and in this thread. The
    caches' slots must be open. Yield a placeholder that the model gets as its cache.

    Args:
        allowed: for each cache the slots that each node sees, bool [B, n, view].
    """
    masks = []
    for seen in allowed:
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        masks.append(mask.masked_fill_(~seen, torch.finfo(dtype).min)[:, None])  # [B, 1, n, view]
    token = separate_caches.set(list(zip(caches, masks)))
    try:
        yield Cache(layers=[_Apart() for _ in range(caches[0].n_layers)])
    finally:
        separate_caches.reset(token)


def attend_apart(
    layer: int, caches: list[tuple[TreeCache, torch.Tensor]], query, key, value, scaling: float | None
) -> torch.Tensor:
    """Return attention outputs [1, T, h, d] of q [1, h, T, d] and new k, v [1, kv, T, d], cache by cache."""
    parts, first = [], 0
    for cache, mask in caches:
        batch, _, n, view = mask.shape
        stretch = slice(first, first + batch * n)
        q, k, v = (x[0, :, stretch].unflatten(1, (batch, n)).transpose(0, 1) for x in (query, key, value))
        cache.allocate(k.shape[1], k.shape[3])
        cache.write(layer, cache.slots, k, v)
        out = grouped_attention(q, *cache.keys_values(layer, view), mask, scaling)  # [B, n, h, d]
        parts.append(out.flatten(0, 1))
        first += batch * n
    return torch.cat(parts)[None]
