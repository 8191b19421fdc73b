"""The one place that knows about key/value slots and attention masks of the target.

`TreeCache` is a preallocated transformers `Cache` in which every row (sequence) has its own length. The
tokens of a forward land in the slots behind the committed ones, a tree's accepted path is committed by
gathering its slots to the front, and what is left behind is overwritten by the next forward. Keys are stored
already rotated with position `root + depth`, so committing needs no re-rotation.

The facts this rests on (which forms of 4-D mask each architecture takes, that a forward with mask and
positions calls nothing but `update`) hold for transformers 5.21 to 5.23.
"""

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from drafttrain.utils.errors import UserError


class KvCache:
    """Keys and values of some layers, [layers, 2, B, heads, max_len, dim]; every row has its own length.

    What lies beyond a row's length is of no account, and the next forward writes there.

    Attributes:
        kv: the buffer; None until `allocate`.
        lengths: verified tokens of each row, int64 [B].
    """

    def __init__(
        self, n_layers: int, batch: int, max_len: int, dtype: torch.dtype, device: torch.device | str
    ):
        self.n_layers, self.batch, self.max_len = n_layers, batch, max_len
        self.dtype, self.device = dtype, torch.device(device)
        self.lengths = torch.zeros(batch, dtype=torch.long, device=self.device)  # [B]
        self.kv: torch.Tensor | None = None
        self.rows = torch.arange(batch, device=self.device)[:, None]  # [B, 1]

    def allocate(self, heads: int, dim: int) -> None:
        """Make the buffer once the sizes of keys are known (configs name them differently)."""
        if self.kv is None:
            shape = (self.n_layers, 2, self.batch, heads, self.max_len, dim)
            self.kv = torch.zeros(shape, dtype=self.dtype, device=self.device)

    def reserve(self, n: int) -> int:
        """Make room for n slots after each row's verified ones; return how many slots are then in view."""
        view = int(self.lengths.max()) + n
        if view > self.max_len:
            more = max(view, 2 * self.max_len) - self.max_len
            self.max_len += more
            if self.kv is not None:
                self._put_buffer(torch.nn.functional.pad(self.kv, (0, 0, 0, more)))
        return view

    def select_rows(self, rows: torch.Tensor) -> None:
        """Go on with the rows of these numbers alone, int64 [b]; one that is named twice becomes two."""
        if self.kv is not None:
            used = int(self.lengths.max())
            kept = self.kv.new_zeros((*self.kv.shape[:2], len(rows), *self.kv.shape[3:]))
            kept[..., :used, :] = self.kv[..., :used, :].index_select(2, rows)
            self._put_buffer(kept)
        self.batch, self.lengths = len(rows), self.lengths[rows]
        self.rows = torch.arange(self.batch, device=self.device)[:, None]  # [B, 1]

    def replace_rows(self, rows: torch.Tensor, other: "KvCache") -> None:
        """Put the sequences of another cache, which is no longer, in the place of these rows, int64 [b]."""
        used = int(other.lengths.max())
        self.kv[:, :, rows, :, :used] = other.kv[..., :used, :]
        self.lengths[rows] = other.lengths

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put keys and values [B, heads, n, dim] of a layer into slots [B, n], or [n], the same ones in each
        row."""
        for which, new in ((0, keys), (1, values)):
            kept = self.kv[layer, which]  # [B, heads, max_len, dim]
            if slots.ndim == 1 or len(slots) == 1:
                kept.index_copy_(2, slots.view(-1), new)
            else:
                # index_put_ writes B x n vectors; scatter_ on CPU was seen to copy the whole buffer each time
                kept.transpose(1, 2).index_put_((self.rows, slots), new.transpose(1, 2))

    def _put_buffer(self, kv: torch.Tensor) -> None:
        self.kv = kv


class _TreeLayer(CacheLayerMixin):
    is_sliding, is_compileable = False, True

    def __init__(self, owner: "TreeCache", index: int):
        super().__init__()
        self.owner, self.index, self.is_initialized = owner, index, True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.owner.allocate(key_states.shape[1], key_states.shape[3])
        self.keys, self.values = self.owner.kv[self.index, 0], self.owner.kv[self.index, 1]

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Writes k, v [B, heads, n, dim] into the open slots; returns all slots in view [B, heads, view,
        dim]."""
        owner = self.owner
        if self.keys is None:
            self.lazy_initialization(key_states, value_states)
        owner.write(self.index, owner.slots, key_states, value_states)
        return self.keys[:, :, : owner.view], self.values[:, :, : owner.view]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.view, 0

    def get_seq_length(self) -> int:
        return int(self.owner.lengths.max())

    def get_max_length(self) -> int:
        return self.owner.max_len

    get_max_cache_shape = get_max_length


class TreeCache(KvCache, Cache):
    """The cache of a target, which transformers' modules write to as well: its buffer is made by the first
    forward.
    """

    def __init__(
        self, n_layers: int, batch: int, max_len: int, dtype: torch.dtype, device: torch.device | str
    ):
        KvCache.__init__(self, n_layers, batch, max_len, dtype, device)
        self.slots: torch.Tensor | None = None
        self.view = 0
        Cache.__init__(self, layers=[_TreeLayer(self, i) for i in range(n_layers)])

    def _put_buffer(self, kv: torch.Tensor) -> None:
        self.kv = kv
        for layer in self.layers:
            layer.keys = layer.values = None  # bound to the new buffer at the next update

    def open(self, n: int) -> tuple[torch.Tensor, int]:
        """Opens n slots behind each row's committed ones for the next forward.

        Returns:
            slots int64 [B, n] and the number of slots in view.

        Raises:
            UserError: a row would outgrow the cache.
        """
        longest = int(self.lengths.max()) + n
        if longest > self.max_len:
            raise UserError(
                f"{longest} tokens do not fit a cache of {self.max_len}: raise max_len or shorten the prompt"
            )
        slots = self.lengths[:, None] + torch.arange(n, device=self.device)  # [B, n]
        self.open_at(slots, longest)
        return slots, longest

    def open_at(self, slots: torch.Tensor, view: int) -> None:
        """Opens these slots [B, n] for the next forward, with so many in view."""
        self.slots, self.view = slots[0] if self.batch == 1 else slots, view

    def commit(self, path: torch.Tensor, counts: torch.Tensor) -> None:
        """Keeps the accepted nodes of the last forward and forgets the others.

        Args:
            path: node indices of each row's accepted path, int64 [B, m], rows padded with any valid index.
            counts: how many of them are kept, int64 [B].
        """
        m = path.shape[1]
        if m and not torch.equal(path, torch.arange(m, device=path.device).expand_as(path)):
            source = self.lengths[:, None] + path  # [B, m]
            goal = self.lengths[:, None] + torch.arange(m, device=path.device)  # [B, m]
            # source and goal overlap: both forms copy what they read before they write
            if self.batch == 1:
                self.kv.index_copy_(4, goal[0], self.kv.index_select(4, source[0]))
            else:
                slots_first = self.kv.permute(2, 4, 0, 1, 3, 5)  # [B, max_len, L, 2, heads, dim]
                slots_first.index_put_((self.rows, goal), slots_first[self.rows, source])
        self.lengths = self.lengths + counts


def allowed_slots(
    lengths: torch.Tensor, ancestors: torch.Tensor, slots: torch.Tensor, view: int
) -> torch.Tensor:
    """Which slots each new token may attend to: everything committed in its row, its ancestors and itself.

    Args:
        lengths: committed tokens [B].
        ancestors: [B, n, n] or [n, n] bool, row i True at the ancestors of node i and at i itself.
        slots: [B, n] slot of each node.
        view: number of slots.

    Returns:
        bool [B, n, view]
    """
    batch, n = slots.shape
    allowed = torch.arange(view, device=slots.device) < lengths[:, None]  # [B, view]
    allowed = allowed[:, None].expand(batch, n, view).clone()  # [B, n, view]
    return allowed.scatter_(2, slots[:, None].expand(batch, n, n), ancestors.expand(batch, n, n))


def attention_mask(
    allowed: torch.Tensor,
    kv_positions: torch.Tensor,
    positions: torch.Tensor,
    config,
    dtype: torch.dtype,
) -> torch.Tensor | dict[str, torch.Tensor]:
    """The form of mask a model wants for an explicit pattern of attention: 0 where it may look, else the
    lowest number of its type. Eager attention takes no other; SDPA would make this of a bool mask in every
    block anew.

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
