"""C2T (Huo et al. 2025): a classifier decides, node by node, what is verified and drafted on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from drafttrain.trees.drafter import Drafter
from drafttrain.trees.expand import top_entropy
from drafttrain.trees.interface import TreePolicy
from drafttrain.trees.tree import TokenTree, marked_nodes
from drafttrain.utils.errors import UserError


class Confidence(Protocol):
    """Tells how likely nodes are to be accepted. On the host and in numpy: growth waits for what it says of
    some dozens of nodes, and an operator of torch costs more than all the arithmetic.

    Attributes:
        features: those of `features.FEATURES` that it reads.
    """

    features: Sequence[str]

    def judge(self, x: np.ndarray) -> np.ndarray:
        """Confidence within 0 and 1, fp32 [...], from features fp32 [..., F]."""


@dataclass(frozen=True)
class Plain:
    """One feature as it is, which is a probability: what C2T is compared with."""

    name: str

    @property
    def features(self) -> tuple[str, ...]:
        return (self.name,)

    def judge(self, x: np.ndarray) -> np.ndarray:
        return x[..., 0]


@dataclass
class C2tPolicy(TreePolicy):
    """Algorithm 1 of the paper: each node of a layer gets its `top_k` most probable children; those with a
    confidence above `beta` stay, of each layer at most the `layer_k` most confident ones, and all that stay
    are verified and expanded. Growth ends where none stays.

    Among equally confident nodes of a layer the earlier ones win.

    Attributes:
        confidence: of nodes: the classifier of a bundle, or another.
        beta: threshold, exclusive.
        top_k: children that are looked at per expanded node.
        layer_k: nodes of a layer that may stay; None: all (the paper's "naive" method).
        max_depth: layers at most.
        expand: threshold, exclusive, of the nodes that are expanded; None: all that are verified, as in the
            paper. Ours: a token more to verify costs less than a layer more to draft.
    """

    confidence: Confidence
    beta: float = 0.5
    top_k: int = 15
    layer_k: int | None = 15
    max_depth: int = 10
    expand: float | None = None

    def __post_init__(self) -> None:
        for threshold in (self.beta, self.expand):
            if threshold is not None and not 0 < threshold < 1:
                raise UserError(f"threshold {threshold} of a tree must lie between 0 and 1, both excluded")
        if self.top_k < 1 or self.layer_k == 0:
            raise UserError("top_k and layer_k of a tree must be at least 1")

    @classmethod
    def chain(cls, confidence: Confidence, beta: float = 0.85, max_depth: int = 10) -> "C2tPolicy":
        """Chain mode: the most probable tokens, one after the other, until one is not confident enough."""
        return cls(confidence, beta, 1, 1, max_depth)

    @classmethod
    def dymax(cls, threshold: float = 0.3, max_depth: int = 10) -> "C2tPolicy":
        """DyMax: a chain up to the first token whose own probability is not above the threshold."""
        return cls.chain(Plain("p"), threshold, max_depth)

    @classmethod
    def dyjoint(cls, threshold: float = 0.08, max_depth: int = 10) -> "C2tPolicy":
        """DyJoint: a chain up to the first token whose joint probability is not above the threshold."""
        return cls.chain(Plain("P"), threshold, max_depth)

    @classmethod
    def joint(
        cls, threshold: float = 0.05, top_k: int = 15, layer_k: int | None = 15, max_depth: int = 10
    ) -> "C2tPolicy":
        """The same tree by joint probability alone: what the classifier has to beat."""
        return cls(Plain("P"), threshold, top_k, layer_k, max_depth)

    def grow(self, drafter: Drafter, state: object, root: torch.Tensor) -> TokenTree:
        """Drafts trees behind root tokens [B]."""
        tree = TokenTree.root_only(root)
        frontier, counts = torch.zeros_like(root)[:, None], torch.ones_like(root)  # [B, 1], [B]
        joint = torch.zeros_like(frontier, dtype=torch.float)  # [B, f] of the paths to the frontier
        k = min(self.top_k, drafter.draft_vocab_size)
        for depth in range(1, self.max_depth + 1):
            if "H" in self.confidence.features:  # it costs more than all the rest
                expanded = drafter.expand(state, tree, frontier)  # [B, f, D]
                log_probs, ids = expanded.topk(k)  # [B, f, k]
                entropies = top_entropy(expanded)  # [B, f]
            else:
                log_probs, ids = drafter.top(state, tree, frontier, k)  # [B, f, k]
                entropies = torch.full_like(log_probs[:, :, 0], torch.nan)  # [B, f]
            paths = joint[:, :, None] + log_probs  # [B, f, k]
            sure = self._judge(log_probs, paths, entropies, depth)  # [B, f, k]
            sure = sure.reshape(len(root), -1)  # [B, f * k]
            if len(root) > 1:  # a row that is alone has no padding
                sure[np.arange(sure.shape[1]) >= k * counts.cpu().numpy()[:, None]] = 0.0
            stay = self._survivors(sure)  # [B, f * k]
            kept, added = marked_nodes(torch.from_numpy(stay).to(root.device))  # [B, v], [B]
            if not kept.shape[1]:
                break
            origin, before = kept // k, tree.sizes[:, None]  # [B, v] place in the frontier, [B, 1]
            tree = tree.append(
                frontier.gather(1, origin),
                drafter.to_target(ids.flatten(1).gather(1, kept)),
                log_probs.flatten(1).gather(1, kept),
                entropies=entropies.gather(1, origin),
                counts=added,
            )
            nodes, counts = kept, added
            if self.expand is not None:
                nodes, counts = marked_nodes(torch.from_numpy(stay & (sure > self.expand)).to(root.device))
                if not nodes.shape[1]:
                    break
            place = torch.from_numpy(stay.cumsum(1) - 1).to(root.device)  # [B, f * k] in the new layer
            padding = torch.arange(nodes.shape[1], device=root.device) >= counts[:, None]  # [B, w]
            frontier = (before + place.gather(1, nodes)).masked_fill(padding, 0)  # [B, w]
            joint = paths.flatten(1).gather(1, nodes)  # [B, w]
        return tree

    def _judge(
        self, log_probs: torch.Tensor, paths: torch.Tensor, entropies: torch.Tensor, depth: int
    ) -> np.ndarray:
        """Confidence of a layer's nodes, fp32 [B, f, k].

        Args:
            log_probs, paths: of the nodes and of the paths to them [B, f, k].
            entropies: of the distributions that the nodes come from [B, f].
        """
        features = self.confidence.features
        known = {
            "P": lambda: np.exp(paths.numpy(force=True)),
            "H": lambda: entropies.numpy(force=True)[:, :, None],
            "d": lambda: depth,
            "p": lambda: np.exp(log_probs.numpy(force=True)),
            "rank": lambda: np.arange(paths.shape[2]),
        }
        x = np.empty((*paths.shape, len(features)), np.float32)  # [B, f, k, F]
        for i, name in enumerate(features):
            x[..., i] = known[name]()
        return self.confidence.judge(x)

    def _survivors(self, sure: np.ndarray) -> np.ndarray:
        """Which nodes of a layer stay, bool [B, m], by their confidence [B, m]."""
        above = sure > self.beta  # [B, m]
        if self.layer_k is None or above.sum(1).max() <= self.layer_k:  # what is above is what is best
            return above
        order = np.argsort(-sure, axis=1, kind="stable")[:, : self.layer_k]  # [B, layer_k]
        best = np.zeros_like(above)  # [B, m]
        np.put_along_axis(best, order, True, axis=1)
        return above & best
