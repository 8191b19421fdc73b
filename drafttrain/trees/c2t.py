"""C2T (Huo et al. 2025): a classifier decides for each node whether it is verified and expanded."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from drafttrain.trees.costs import Costs
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.expand import top_entropy
from drafttrain.trees.interface import DEEPEST, LARGEST, WIDEST, Confidence, TreePolicy
from drafttrain.trees.tree import TokenTree, marked_nodes
from drafttrain.utils.ranges import setting


@dataclass(frozen=True)
class Plain:
    """Confidence that is a single feature, which is a probability itself: for the baselines of C2T."""

    name: str

    @property
    def features(self) -> tuple[str, ...]:
        """Return the name of the feature."""
        return (self.name,)

    def predict(self, x: np.ndarray) -> np.ndarray:
        """Return the feature, fp32 [...], from features fp32 [..., 1]."""
        return x[..., 0]


@dataclass
class C2tPolicy(TreePolicy):
    """Algorithm 1 of the paper: each node of a layer gets its `top_k` most probable children; those with a
    confidence above `beta` are kept, of each layer at most the `layer_k` most confident ones, and all that
    are kept are verified and expanded. Growth ends where none is kept.

    Among equally confident nodes of a layer the earlier ones win.

    Attributes:
        confidence: predicts the confidence of nodes: the classifier of a bundle, or another.
        beta: confidence above which (exclusive) a node is kept.
        top_k: children considered per expanded node.
        layer_k: nodes kept per layer at most; None: all that a tree has room for (the paper's "naive"
            method).
        max_depth: layers at most.
        expand: confidence above which (exclusive) a kept node is expanded; None: all are, as in the paper.
            Ours, because verifying one more token costs less than drafting one more layer.
    """

    confidence: Confidence
    beta: float = setting(0.5, gt=0, lt=1)
    top_k: int = setting(15, ge=1, le=WIDEST)
    layer_k: int | None = setting(15, ge=1, le=WIDEST)
    max_depth: int = setting(10, ge=0, le=DEEPEST)
    expand: float | None = setting(None, gt=0, lt=1)

    @classmethod
    def calibrated(cls, costs: Costs, given: Collection[str] = ()) -> dict[str, Any]:
        """Return the thresholds tuned for this machine, if there are any; none if the user gives `beta`,
        which is the paper's method."""
        names = ("top_k", "beta", "expand") if "beta" not in given else ()
        return {name: getattr(costs, name) for name in names if getattr(costs, name) is not None}

    @classmethod
    def chain(cls, confidence: Confidence, beta: float = 0.85, max_depth: int = 10) -> "C2tPolicy":
        """Return chain mode: the most probable tokens in turn, until one is not confident enough."""
        return cls(confidence, beta, 1, 1, max_depth)

    @classmethod
    def dymax(cls, threshold: float = 0.3, max_depth: int = 10) -> "C2tPolicy":
        """Return DyMax: a chain up to the first token whose own probability is not above a threshold."""
        return cls.chain(Plain("p"), threshold, max_depth)

    @classmethod
    def dyjoint(cls, threshold: float = 0.08, max_depth: int = 10) -> "C2tPolicy":
        """Return DyJoint: a chain up to the first token whose joint probability is not above a threshold."""
        return cls.chain(Plain("P"), threshold, max_depth)

    @classmethod
    def joint(
        cls, threshold: float = 0.05, top_k: int = 15, layer_k: int | None = 15, max_depth: int = 10
    ) -> "C2tPolicy":
        """Return the same tree by joint probability only: the baseline of the classifier."""
        return cls(Plain("P"), threshold, top_k, layer_k, max_depth)

    def grow(self, drafter: Drafter, state: object, root: torch.Tensor) -> TokenTree:
        """Draft trees after root tokens [B]."""
        tree = TokenTree.root_only(root)
        frontier, counts = torch.zeros_like(root)[:, None], torch.ones_like(root)  # [B, 1], [B]
        joint = torch.zeros_like(frontier, dtype=torch.float)  # [B, f] of the paths to the frontier
        k = min(self.top_k, drafter.draft_vocab_size)
        for depth in range(1, self.max_depth + 1):
            log_probs, ids, entropies = self._children(drafter, state, tree, frontier, k)
            paths = joint[:, :, None] + log_probs  # [B, f, k]
            confidence = self._confidence(log_probs, paths, entropies, depth).reshape(len(root), -1)
            if len(root) > 1:  # a single row has no padding
                confidence[np.arange(confidence.shape[1]) >= k * counts.cpu().numpy()[:, None]] = 0.0
            keep = self._kept(confidence, LARGEST - tree.width)  # [B, f * k]
            marked = torch.from_numpy(keep).to(root.device, non_blocking=True)  # [B, f * k]
            kept, added = marked_nodes(marked)  # [B, v], [B]
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
                chosen = keep & (confidence > self.expand)  # [B, f * k]
                nodes, counts = marked_nodes(torch.from_numpy(chosen).to(root.device, non_blocking=True))
                if not nodes.shape[1]:
                    break
            place = torch.from_numpy(keep.cumsum(1) - 1)  # [B, f * k] in the new layer
            place = place.to(root.device, non_blocking=True)
            padding = torch.arange(nodes.shape[1], device=root.device) >= counts[:, None]  # [B, w]
            frontier = (before + place.gather(1, nodes)).masked_fill(padding, 0)  # [B, w]
            joint = paths.flatten(1).gather(1, nodes)  # [B, w]
        return tree

    def _children(
        self, drafter: Drafter, state: object, tree: TokenTree, frontier: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the k most probable tokens after the frontier [B, f]: log-probabilities and draft ids
        [B, f, k], and entropies [B, f], NaN if no feature needs them: they cost more than all the rest."""
        if "H" not in self.confidence.features:
            log_probs, ids = drafter.top(state, tree, frontier, k)
            return log_probs, ids, torch.full_like(log_probs[:, :, 0], torch.nan)
        expanded = drafter.expand(state, tree, frontier)  # [B, f, D]
        return *expanded.topk(k), top_entropy(expanded)

    def _confidence(
        self, log_probs: torch.Tensor, paths: torch.Tensor, entropies: torch.Tensor, depth: int
    ) -> np.ndarray:
        """Return the confidence of a layer's nodes, fp32 [B, f, k].

        Args:
            log_probs, paths: log-probabilities of the nodes, and joint ones of the paths to them [B, f, k].
            entropies: entropies of the distributions that the nodes come from [B, f].
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
        return self.confidence.predict(x)

    def _kept(self, confidence: np.ndarray, room: int) -> np.ndarray:
        """Return which nodes of a layer are kept, bool [B, m], given their confidence [B, m]; at most `room`
        of each row."""
        above = confidence > self.beta  # [B, m]
        most = room if self.layer_k is None else min(self.layer_k, room)
        if above.sum(1).max() <= most:
            return above
        order = np.argsort(-confidence, axis=1, kind="stable")[:, :most]  # [B, most]
        best = np.zeros_like(above)  # [B, m]
        np.put_along_axis(best, order, True, axis=1)
        return above & best
