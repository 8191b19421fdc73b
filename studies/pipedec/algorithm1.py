"""Dynamic tree attention as PipeDec prints it (Algorithm 1): scores of verified and of predicted keys apart,
one softmax over both.

    python -m studies.pipedec.algorithm1

Prints its time beside that of attention over one cache in which the tree's keys follow the verified ones, as
the stages use it, with the sizes of one of SmolLM2's blocks.
"""

import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch.nn.functional import scaled_dot_product_attention

from studies import arguments

HEADS, DIM, PAST, NODES, ADDED, ROUNDS = 9, 64, 512, 8 * 14, 8, 200


@dataclass
class TwoLevelCache:
    """Keys and values of one block: of the text, and of the tree in flight (§3.2).

    Attributes:
        past: of verified tokens, each [heads, n, dim].
        predict: of the tree's nodes, each [heads, m, dim].
    """

    past: tuple[torch.Tensor, torch.Tensor]
    predict: tuple[torch.Tensor, torch.Tensor] | None = field(default=None)

    def append(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add nodes to the tree's part; return all of it."""
        old = self.predict or (k[:, :0], v[:, :0])
        self.predict = torch.cat([old[0], k], 1), torch.cat([old[1], v], 1)
        return self.predict


def dynamic_tree_attention(
    h: torch.Tensor, cache: TwoLevelCache, weights: Sequence[torch.Tensor], mask: torch.Tensor
) -> torch.Tensor:
    """Return the output [n, H] of new nodes with states h [n, H]; their keys and values go into the cache.

    Args:
        weights: of queries, keys, values and output, each [H, H].
        mask: bool [n, m + n], the nodes of the tree that a new one must not see.
    """
    w_q, w_k, w_v, w_o = weights
    heads, _, dim = cache.past[0].shape

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.view(len(h), heads, dim).transpose(0, 1)  # [heads, n, dim]

    q, k, v = split(h @ w_q), split(h @ w_k), split(h @ w_v)  # 1
    k_past, v_past = cache.past  # 2
    k_predict, v_predict = cache.append(k, v)  # 3
    s_past = q @ k_past.mT / dim**0.5  # 4: [heads, n, past]
    s_predict = q @ k_predict.mT / dim**0.5  # [heads, n, m + n]
    s_predict = s_predict.masked_fill(mask, -torch.inf)  # 5
    s = torch.cat([s_past, s_predict], -1).softmax(-1)  # 6
    s_past, s_predict = s.split([k_past.shape[1], k_predict.shape[1]], -1)  # 7
    a = s_past @ v_past + s_predict @ v_predict  # 8: [heads, n, dim]
    return a.transpose(0, 1).reshape(len(h), heads * dim) @ w_o  # 9


def one_cache_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor
) -> torch.Tensor:
    """Return the attention [heads, n, dim] over one buffer of keys and values [heads, past + m + n, dim]."""
    return scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=allowed)[0]


def study(args: Namespace) -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    weights = [random(HEADS * DIM, HEADS * DIM) / 24 for _ in range(4)]
    past, tree = ((random(HEADS, n, DIM), random(HEADS, n, DIM)) for n in (PAST, NODES))
    h, mask = random(ADDED, HEADS * DIM), torch.rand(ADDED, NODES + ADDED, generator=generator) < 0.5
    buffer = torch.cat([past[0], tree[0], random(HEADS, ADDED, DIM)], 1)
    allowed = torch.cat([torch.ones(ADDED, PAST, dtype=torch.bool), ~mask], 1)

    def together() -> None:
        q, k, _ = ((h @ one).view(ADDED, HEADS, DIM).transpose(0, 1) for one in weights[:3])
        buffer[:, -ADDED:] = k
        one_cache_attention(q, buffer, buffer, allowed).transpose(0, 1).reshape(ADDED, -1) @ weights[3]

    ways: dict[str, Callable[[], object]] = {
        "two caches": lambda: dynamic_tree_attention(h, TwoLevelCache(past, tree), weights, mask),
        "one cache": together,
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            taken[name].append(time.perf_counter() - started)
    for name, seconds in taken.items():
        print(f"{name}: {1e6 * statistics.median(seconds):.0f} µs")


def main(argv: Sequence[str] | None = None) -> int:
    return arguments.run(study, __doc__, argv, (), "runs/pipedec")


if __name__ == "__main__":
    arguments.start(main)
