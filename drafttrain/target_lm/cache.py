"""KV caches of targets and drafters.

Every row (sequence) has its own length. A forward writes its tokens to the slots after the committed ones. A
tree's accepted path is committed by gathering its slots to the front; the next forward overwrites the others.
Keys are stored already rotated with position `root + depth`, so committing needs no re-rotation.

`TreeCache` is also a transformers `Cache`. That a forward with mask and positions calls nothing but `update`
holds for transformers 5.21 to 5.24.
"""

import weakref
from collections.abc import Sequence

import torch
import transformers
from packaging.version import Version
from transformers.cache_utils import Cache, CacheLayerMixin

from drafttrain.kernels.blocks import Nodes, places
from drafttrain.kernels.memory import empty
from drafttrain.kernels.trees import commit_slots, is_native
from drafttrain.utils.errors import UserError

# the name of the cache argument of a model's forward
CACHE_ARGUMENT = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"


class KvCache:
    """KV cache of some layers, [layers, 2, B, heads, max_len, dim]; every row has its own length.

    Slots beyond a row's length are free: the next forward writes there. The buffer may have room for more
    rows, so that rows are dropped and appended without copying the others.

    Attributes:
        kv: the rows' part of the buffer; None until `allocate`.
        lengths: verified tokens of each row, int64 [B].
        batch: B.
        carried: further tensors [B, …] of the cache's owner, which are selected and appended with the rows.
    """

    def __init__(
        self, n_layers: int, batch: int, max_len: int, dtype: torch.dtype, device: torch.device | str
    ):
        self.n_layers, self.max_len, self.capacity = n_layers, max_len, batch
        self.dtype, self.device = dtype, torch.device(device)
        self.carried: dict[str, torch.Tensor] = {}
        self.kv: torch.Tensor | None = None
        self._buffer: torch.Tensor | None = None  # [layers, 2, capacity, heads, max_len, dim]
        self._set_rows(torch.zeros(batch, dtype=torch.long, device=self.device))

    def allocate(self, heads: int, dim: int) -> None:
        """Allocate the buffer, once the sizes of the keys are known (configs name them differently)."""
        if self.kv is None:
            # no huge pages: a short prompt would fault in, and clear, the room for all later tokens
            shape = (self.n_layers, 2, self.capacity, heads, self.max_len, dim)
            self._set_buffer(torch.zeros(shape, dtype=self.dtype, device=self.device))

    def reserve(self, n: int) -> int:
        """Make room for n slots after each row's verified ones; return the slots that the longest row then
        has in view."""
        view = self.longest() + n
        self._lengthen(view)
        return view

    @property
    def lengths(self) -> torch.Tensor:
        return self._lengths

    @lengths.setter
    def lengths(self, lengths: torch.Tensor) -> None:
        self._lengths, self._most, self._counted = lengths, None, None
        if lengths.device.type == "cuda" and len(lengths):
            from drafttrain.target_lm.longest import Longest

            self._counted = Longest(lengths)

    def add(self, counts: torch.Tensor, most: int) -> None:
        """Count the tokens of each row, int64 [B], that have been written after its verified ones, at most
        `most` of them."""
        before = self.longest() if self._counted else 0
        self.lengths, self._most = self.lengths + counts, before + most

    def longest(self) -> int:
        """Return the number of verified tokens of the longest row; on a GPU that has not counted them yet, a
        bound for which it is not waited for."""
        if self._counted is None:
            return max(self.lengths.tolist())
        if self._most is None or self._counted.is_known():
            return self._counted.value()
        return min(self._most, self.max_len)

    def reserve_rows(self, n: int) -> None:
        """Make room for n rows in all."""
        if n <= self.capacity:
            return
        self.capacity = n
        if self.kv is not None:
            buffer = self.kv.new_zeros((*self.kv.shape[:2], n, *self.kv.shape[3:]))
            used = self.longest()
            buffer[:, :, : self.batch, :, :used] = self.kv[..., :used, :]
            self._set_buffer(buffer)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Keep only the rows with these indices, int64 [b], in this order; an index that occurs twice gives
        two rows. Rows that keep their place are not copied."""
        self.reserve_rows(len(rows))
        if self.kv is not None:
            used = self._buffer[..., : self.longest(), :]
            moved = {place: row for place, row in enumerate(rows.tolist()) if place != row}
            saved = {row: used[:, :, row].clone() for row in moved.values() if row in moved}
            for place, row in moved.items():  # row by row: indexing with a list of them is ten times slower
                used[:, :, place] = saved.get(row, used[:, :, row])
        self.carried = {name: value[rows] for name, value in self.carried.items()}
        self._set_rows(self.lengths[rows])

    def append_rows(self, other: "KvCache") -> None:
        """Append the rows of another cache."""
        total, used = self.batch + other.batch, other.longest()
        self.reserve_rows(total)
        self._lengthen(used)
        self._buffer[:, :, self.batch : total, :, :used] = other.kv[..., :used, :]
        self.carried = joined_rows([self, other])
        self._set_rows(torch.cat([self.lengths, other.lengths]))

    def clear_rows(self, rows: torch.Tensor) -> None:
        """Set the rows marked in bool [B] to zero. Masked slots have weight 0 in attention, and 0 · NaN would
        reach the next sequences in these rows."""
        self.kv[:, :, rows] = 0

    def copy(self, length: int, room: int) -> "KvCache":
        """Return a copy of the only row's first `length` tokens, with slots for `room` tokens in all."""
        twin = type(self)(self.n_layers, 1, max(length, room), self.dtype, self.device)
        if self.kv is not None:
            twin._set_buffer(_with_room(self.kv[..., :length, :], twin.max_len))
        twin.lengths = torch.full_like(self.lengths, length)
        twin.carried = {name: value.clone() for name, value in self.carried.items()}
        return twin

    def nodes(
        self, positions: torch.Tensor, slots: torch.Tensor, ancestors: torch.Tensor | None = None
    ) -> Nodes:
        """Return nodes with these positions and slots [B, n] for the native blocks; each sees the verified
        slots and those marked in `ancestors` (`Nodes.of_batch`)."""
        return Nodes.of_batch(self.kv, self.lengths, positions, slots, ancestors)

    def places(self) -> list[tuple[int, int, int, int]]:
        """Return each row's length and where its keys and values are stored (`kernels.blocks.places`)."""
        return places(self.kv, self.lengths)

    def keys_values(self, layer: int, view: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a layer's keys and values in the first `view` slots, [B, heads, view, dim] each."""
        keys, values = self.kv[layer].unbind(0)
        return keys[:, :, :view], values[:, :, :view]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values [B, heads, n, dim] of a layer to slots [B, n], or to slots [n], the same in
        all rows."""
        for which, new in ((0, keys), (1, values)):
            kept = self.kv[layer, which]  # [B, heads, max_len, dim]
            if slots.ndim == 1 or len(slots) == 1:
                kept.index_copy_(2, slots.view(-1), new)
            else:
                # index_put_ writes B x n vectors; scatter_ on CPU was seen to copy the whole buffer each time
                kept.transpose(1, 2).index_put_((self.rows, slots), new.transpose(1, 2))

    def commit(self, path: torch.Tensor, counts: torch.Tensor) -> None:
        """Commit the accepted path of the last forward, and drop its other nodes.

        Args:
            path: node indices of each row's accepted path, int64 [B, m], rows padded with any valid index.
            counts: number of nodes committed in each row, int64 [B].
        """
        if self.kv is not None and is_native(self.kv):
            commit_slots(self.kv, self.lengths, path, counts)
        elif _differ(order := torch.arange(path.shape[1], device=path.device).expand_as(path), path):
            source, goal = self.lengths[:, None] + path, self.lengths[:, None] + order  # [B, m]
            # source and goal overlap: both forms copy what they read before they write
            if self.batch == 1:
                self.kv.index_copy_(4, goal[0], self.kv.index_select(4, source[0]))
            else:
                slots_first = self.kv.permute(2, 4, 0, 1, 3, 5)  # [B, max_len, L, 2, heads, dim]
                slots_first.index_put_((self.rows, goal), slots_first[self.rows, source])
        self.add(counts, path.shape[1])

    def advance(self, keep: torch.Tensor) -> None:
        """Commit the root of the tree in flight, and keep some of its other nodes in flight: they move to the
        slots right after the root (PipeDec, §3.4.3). For a cache with one row.

        Args:
            keep: nodes of the tree that stay, ascending, without the root, int64 [w].
        """
        self.keep_open(keep, self.lengths)
        self.add(torch.ones_like(self.lengths), 1)

    def keep_open(self, keep: torch.Tensor, start: torch.Tensor) -> None:
        """Move nodes `keep` [w] of a tree that starts in slot `start` [1] to slots start + 1 … start + w."""
        goal = torch.arange(1, len(keep) + 1, device=keep.device)  # [w]
        if _differ(goal, keep):
            self.kv.index_copy_(4, start + goal, self.kv.index_select(4, start + keep))

    def _lengthen(self, slots: int) -> None:
        """Make room for this many slots, at least doubling the buffer, so that it seldom grows."""
        if slots <= self.max_len:
            return
        self.max_len = max(slots, 2 * self.max_len)
        if self.kv is not None:
            self._set_buffer(_with_room(self._buffer, self.max_len))

    def _set_buffer(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self.kv = buffer[:, :, : self.batch]

    def _set_rows(self, lengths: torch.Tensor) -> None:
        self.batch, self.lengths = len(lengths), lengths
        self.rows = torch.arange(self.batch, device=self.device)[:, None]  # [B, 1]
        if self._buffer is not None:
            self._set_buffer(self._buffer)


class TreeLayer(CacheLayerMixin):
    """A layer of a `TreeCache`, as the modules of transformers use it."""

    is_sliding, is_compileable = False, True

    def __init__(self, owner: "TreeCache", index: int):
        super().__init__()
        # a weak reference: in a cycle, the cache of a finished text would stay until garbage collection
        self._owner, self.index, self.is_initialized = weakref.ref(owner), index, True

    @property
    def owner(self) -> "TreeCache":
        """Return the cache that this layer belongs to, which users of the layer keep alive."""
        return self._owner()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.owner.allocate(key_states.shape[1], key_states.shape[3])

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        """Write k, v [B, heads, n, dim] to the open slots; return those in view [B, heads, view, dim]."""
        owner = self.owner
        self.lazy_initialization(key_states, value_states)
        owner.write(self.index, owner.slots, key_states, value_states)
        return owner.keys_values(self.index, owner.view)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.owner.view, 0

    def get_seq_length(self) -> int:
        return self.owner.longest()

    def get_max_length(self) -> int:
        return self.owner.max_len

    get_max_cache_shape = get_max_length


class TreeCache(KvCache, Cache):
    """KV cache of a target that transformers' modules can use too; the first forward allocates its buffer."""

    def __init__(
        self, n_layers: int, batch: int, max_len: int, dtype: torch.dtype, device: torch.device | str
    ):
        KvCache.__init__(self, n_layers, batch, max_len, dtype, device)
        self.slots: torch.Tensor | None = None
        self.view = 0
        Cache.__init__(self, layers=[TreeLayer(self, i) for i in range(n_layers)])

    def open(self, n: int) -> tuple[torch.Tensor, int]:
        """Open the n slots after each row's committed ones: the next forward writes to them.

        Returns:
            slots int64 [B, n] and the number of slots in view.

        Raises:
            UserError: a row would outgrow the cache.
        """
        longest = self.longest() + n
        if longest > self.max_len:
            raise UserError(f"max_len: must be at least {longest}, got {self.max_len}; shorten the prompt")
        slots = self.lengths[:, None] + torch.arange(n, device=self.device)  # [B, n]
        self.open_at(slots, longest)
        return slots, longest

    def open_at(self, slots: torch.Tensor, view: int) -> None:
        """Let the next forward write to these slots [B, n] and see the first `view` slots."""
        self.slots, self.view = slots[0] if self.batch == 1 else slots, view


def _differ(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether slots may differ. A GPU is not waited for to know it: there they may."""
    return x.numel() > 0 and (x.device.type == "cuda" or not torch.equal(x, y))


def _with_room(kept: torch.Tensor, slots: int) -> torch.Tensor:
    """Return a copy of `kept` [..., n, dim] in a buffer with this many slots; the further ones are 0."""
    n = kept.shape[-2]
    buffer = empty((*kept.shape[:-2], slots, kept.shape[-1]), kept.dtype, kept.device)
    buffer[..., :n, :] = kept
    buffer[..., n:, :] = 0
    return buffer


def joined_rows(parts: Sequence[KvCache]) -> dict[str, torch.Tensor]:
    """Return the `carried` tensors that all parts have, with the rows of all parts concatenated."""
    names = [name for name in parts[0].carried if all(name in part.carried for part in parts)]
    return {name: torch.cat([part.carried[name] for part in parts]) for name in names}
