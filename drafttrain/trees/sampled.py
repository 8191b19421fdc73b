"""Trees of sampled candidates, for recursive rejection sampling at temperature above 0."""

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import get_ident

import numpy as np
import torch

from drafttrain.kernels.draw import uniforms
from drafttrain.kernels.growth import grow_drawn
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.interface import LARGEST, TreePolicy
from drafttrain.trees.tree import DrawnFrom, TokenTree, marked_nodes
from drafttrain.utils.errors import UserError
from drafttrain.utils.ranges import setting

OWN = 0x5851F42D4C957F2D  # offset of the seeds of trees
TINY = torch.finfo(torch.float).tiny  # probabilities below it are too coarse in fp32 to be those drawn from


@dataclass(frozen=True)
class _Shape:
    """The parts of a tree that depend on the k_config only.

    Attributes:
        parents, depths, nodes, entropies: as in `TokenTree`, and the indices of the nodes, [n].
        ancestors: bool [n, n].
    """

    parents: torch.Tensor
    depths: torch.Tensor
    nodes: torch.Tensor
    entropies: torch.Tensor
    ancestors: torch.Tensor

    def tree(
        self, tokens: torch.Tensor, log_probs: torch.Tensor, drawn: DrawnFrom | None = None
    ) -> TokenTree:
        """Return trees of the first n nodes, from their tokens and log-probabilities [B, n]."""
        batch, n = tokens.shape
        parts = (self.parents, self.depths, self.entropies)
        parents, depths, entropies = (part[:n].expand(batch, -1) for part in parts)
        sizes, ancestors = tokens.new_full((batch,), n), self.ancestors[:n, :n].expand(batch, -1, -1)
        return TokenTree(tokens, parents, depths, log_probs, entropies, sizes, drawn, ancestors)


@lru_cache(maxsize=64)
def _shape(k_config: tuple[int, ...], device: torch.device) -> _Shape:
    """Return the parts of the trees of a k_config."""
    tree = TokenTree.root_only(torch.zeros(1, dtype=torch.long, device=device))
    begin = 0
    for k in k_config:
        parents = torch.arange(begin, tree.width, device=device).repeat_interleave(k)[None]  # [1, f * k]
        begin = tree.width
        tree = tree.append(parents, torch.zeros_like(parents), torch.zeros(parents.shape, device=device))
    nodes = torch.arange(tree.width, device=device)
    if device.type == "cuda":  # threads with other streams will read the cached tensors
        torch.cuda.current_stream(device).synchronize()
    return _Shape(tree.parents[0], tree.depths[0], nodes, tree.entropies[0], tree.ancestors()[0])


def _marked(worth: torch.Tensor, begin: int) -> torch.Tensor:
    """Return the nodes of a layer that are marked in `worth`, bool [B, f], padded with the root; the layer
    starts at node `begin`."""
    chosen, counts = marked_nodes(worth)  # [B, c]
    padding = torch.arange(chosen.shape[1], device=worth.device) >= counts[:, None]  # [B, c]
    return (begin + chosen).masked_fill(padding, 0)


@dataclass
class SampledTreePolicy(TreePolicy):
    """Growth by draws: each node of layer d gets `k_config[d]` children, drawn without replacement (SEED's
    k_config; a chain is (1, 1, 1)). The draws depend on the sequence's seed and the position of the root.

    Attributes:
        k_config: children per node, layer by layer.
        temperature: temperature of the draws; the output is exact for any.
        candidates: children are drawn from this many most probable tokens; fewer cost less time.
        threshold: least confidence (joint probability of its path by the drafter) of a node that gets
            children, as in PCT (EDD paper, §3.2). It is compared before the children are drawn, so the output
            stays exact. 0: all nodes get children.
    """

    k_config: Sequence[int] = setting(ge=1)
    temperature: float = setting(1.0, gt=0)
    candidates: int = setting(128, ge=1, le=LARGEST)
    threshold: float = setting(0.0, ge=0, le=1)

    draws = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.k_config:
            raise UserError("k_config: must have a number for each layer, got none; write drawn:k_config=2-1")
        if max(self.k_config) > self.candidates:
            raise UserError(
                f"k_config: must be at most candidates ({self.candidates}), got {max(self.k_config)}; raise "
                "candidates"
            )
        if self.nodes > LARGEST:
            raise UserError(
                f"k_config: must be at most {LARGEST} nodes, got {self.nodes}; write smaller numbers"
            )
        self._active: dict[int, list[tuple[int, int]]] = {}  # by thread

    def set_active(self, seeds: Sequence[int], positions: Sequence[int]) -> None:
        """Set the seeds of the sequences that this thread's next trees are for, and how many tokens each has
        emitted. One pair counts for all rows; without any, seed and position are 0."""
        self._active[get_ident()] = list(zip(seeds, positions, strict=True))

    @property
    def max_depth(self) -> int:
        """Return the number of layers of drafts."""
        return len(self.k_config)

    @property
    def nodes(self) -> int:
        """Return the number of nodes of a tree without a threshold, the root included."""
        return 1 + sum(itertools.accumulate(self.k_config, operator.mul))

    def grow(self, drafter: Drafter, state: object, root: torch.Tensor) -> TokenTree:
        """Draft trees after root tokens [B]."""
        batch, size = len(root), min(self.candidates, drafter.draft_vocab_size)
        k_config = tuple(self.k_config)
        shape, seeds = _shape(k_config, root.device), self._seeds(batch)
        n, native = len(shape.parents), getattr(drafter, "grow_natively", None)
        if native:
            parts = shape.depths, shape.ancestors, size, self.temperature, self.threshold, seeds
            grown = native(grow_drawn, state, root, k_config, *parts)
            if grown is not None:
                if self.threshold:  # which may leave out whole layers
                    end = int(grown[2].any(0).nonzero()[-1]) + 1
                    grown = [part[:, :end] for part in grown]
                drawn, log_probs, kept, *drawn_from = grown
                tree = shape.tree(drawn, log_probs, DrawnFrom(*drawn_from))
                return tree.select(kept) if self.threshold else tree
        tokens, log_probs = root.new_zeros(batch, n), root.new_zeros(batch, n, dtype=torch.float)  # [B, n]
        probs = log_probs.new_zeros(batch, n, size)  # [B, n, K]
        ids = tokens.new_zeros(batch, n, size)  # [B, n, K]
        joint, kept = log_probs.clone(), torch.zeros_like(log_probs, dtype=torch.bool)  # [B, n]
        tokens[:, 0], kept[:, 0] = root, True
        begin, end = 0, 1  # of the layer that is expanded
        for k in k_config:
            layer = slice(begin, end)
            frontier, worth = shape.nodes[layer].expand(batch, -1), kept[:, layer]  # [B, f]
            if self.threshold:
                worth = worth & (joint[:, layer].exp() >= self.threshold)  # [B, f]
                frontier = _marked(worth, begin)  # [B, c]
                if not frontier.shape[1]:
                    break
            tree = shape.tree(tokens[:, :end], log_probs[:, :end])
            best, draft_ids = drafter.top(state, tree, frontier, size)  # [B, c, K]
            if self.threshold:
                # a node that is not expanded takes another one's values, and its children are not kept
                place = (worth.cumsum(1) - 1).clamp(min=0)[:, :, None].expand(-1, -1, size)  # [B, f, K]
                best, draft_ids = best.gather(1, place), draft_ids.gather(1, place)
            log_q = torch.log_softmax(best.double() / self.temperature, dim=-1)  # [B, f, K]
            # the draws after a node do not depend on which others are expanded
            shares = uniforms(seeds, range(begin, end), size)  # [B, f, K]
            with np.errstate(divide="ignore"):  # exponential noise, E
                noise = torch.from_numpy(np.log(-np.log1p(-shares))).to(root.device)  # [B, f, K]
            q = log_q.exp().float()  # [B, f, K]
            q = q.masked_fill(q < TINY, 0.0)
            # Gumbel top-k: the k largest of log q - log E, in order, are k draws without replacement
            drawn = torch.where(q > 0, log_q - noise, -torch.inf).topk(k).indices  # [B, f, k]
            probs[:, layer] = q * worth[:, :, None] if self.threshold else q
            ids[:, layer] = drafter.to_target(draft_ids)
            begin, end = end, end + drawn[0].numel()
            tokens[:, begin:end] = ids[:, layer].gather(2, drawn).flatten(1)
            log_probs[:, begin:end] = best.gather(2, drawn).flatten(1)
            if self.threshold:
                joint[:, begin:end] = joint[:, layer].repeat_interleave(k, 1) + log_probs[:, begin:end]
                kept[:, begin:end] = worth.repeat_interleave(k, 1)
        grown = shape.tree(tokens[:, :end], log_probs[:, :end], DrawnFrom(probs[:, :end], ids[:, :end]))
        return grown.select(kept[:, :end]) if self.threshold else grown

    def _seeds(self, batch: int) -> list[int]:
        """Return the seeds of the next trees, far from the seeds that the acceptance of candidates uses."""
        active = self._active.get(get_ident(), [(0, 0)])
        active = active * (batch if len(active) == 1 else 1)
        return [(OWN + 1_000_003 * seed + position) % 2**63 for seed, position in active]
