"""Several KV caches as one, for drafting or verifying the sequences of several owners together."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache

from drafttrain.kernels.blocks import Nodes
from drafttrain.target_lm.cache import KvCache, TreeCache, TreeLayer, joined_rows


class JoinedCache(TreeCache):
    """The rows of several caches as one batch, for one forward over all of them. Writes go directly to the
    caches, whose rows must stay the same until `split`.
    """

    def __init__(self, parts: Sequence[KvCache]):
        first, self.parts = parts[0], list(parts)
        self.n_layers, self.dtype, self.device = first.n_layers, first.dtype, first.device
        self.batch = sum(part.batch for part in parts)
        self.slots, self.view = None, 0
        self.carried = joined_rows(parts)
        Cache.__init__(self, layers=[TreeLayer(self, i) for i in range(self.n_layers)])

    def split(self) -> None:
        """Return to each cache its rows of the `carried` tensors."""
        for part, rows in self._by_part():
            part.carried = {name: value[rows] for name, value in self.carried.items()}

    def _by_part(self) -> Iterator[tuple[KvCache, slice]]:
        first = 0
        for part in self.parts:
            yield part, slice(first, first + part.batch)
            first += part.batch

    @property
    def lengths(self) -> torch.Tensor:
        return torch.cat([part.lengths for part in self.parts])

    @lengths.setter
    def lengths(self, lengths: torch.Tensor) -> None:
        for part, rows in self._by_part():
            part.lengths = lengths[rows]

    def add(self, counts: torch.Tensor, most: int) -> None:
        for part, rows in self._by_part():
            part.add(counts[rows], most)

    def longest(self) -> int:
        return max(part.longest() for part in self.parts)

    @property
    def max_len(self) -> int:
        return max(part.max_len for part in self.parts)

    def allocate(self, heads: int, dim: int) -> None:
        for part in self.parts:
            part.allocate(heads, dim)

    def reserve(self, n: int) -> int:
        return max(part.reserve(n) for part in self.parts)

    def nodes(
        self, positions: torch.Tensor, slots: torch.Tensor, ancestors: torch.Tensor | None = None
    ) -> Nodes:
        shared = ancestors is None or ancestors.ndim == 2 or len(ancestors) == 1
        return Nodes.join(
            [
                part.nodes(positions[rows], slots[rows], ancestors if shared else ancestors[rows])
                for part, rows in self._by_part()
            ]
        )

    def places(self) -> list[tuple[int, int, int, int]]:
        return [place for part in self.parts for place in part.places()]

    def keys_values(self, layer: int, view: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return copies, padded to `view` slots, as the caches differ in length."""
        found = [part.keys_values(layer, view) for part in self.parts]
        padded = [[F.pad(one, (0, 0, 0, view - one.shape[2])) for one in both] for both in found]
        keys, values = zip(*padded)
        return torch.cat(keys), torch.cat(values)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        for part, rows in self._by_part():
            part.write(layer, slots if slots.ndim == 1 else slots[rows], keys[rows], values[rows])

    def commit(self, path: torch.Tensor, counts: torch.Tensor) -> None:
        for part, rows in self._by_part():
            part.commit(path[rows], counts[rows])
