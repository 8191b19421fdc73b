"""Batches of trees of drafted tokens: grown by policies, verified by the target, accepted by rules.

A chain is a tree. This module knows neither target nor drafter.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from drafttrain.kernels import trees as kernels


@dataclass(frozen=True)
class DrawnFrom:
    """Distributions that the children of each node were drawn from, one after the other without replacement.

    Attributes:
        probs: of K tokens after each node, fp32 [B, n, K]; zero for nodes without children.
        ids: the target's ids of those tokens, int64 [B, n, K].
    """

    probs: torch.Tensor
    ids: torch.Tensor


@dataclass(frozen=True)
class TokenTree:
    """B trees in breadth-first order: node 0 is the root, and parents come before their children.

    Rows may hold fewer nodes than the widest one: valid nodes come first, padding nodes follow. A padding
    node has parent 0, depth 0, token 0, log-probability -inf and attends only to itself. The widest row has
    no padding, so a batch of one has none.

    Example: root `a` with children `b`, `c`, and `d` under `c`:

        tokens [[a, b, c, d]]  parents [[-1, 0, 0, 2]]  depths [[0, 1, 1, 2]]
        ancestors [[[1,0,0,0], [1,1,0,0], [1,0,1,0], [1,0,1,1]]]

    Attributes:
        tokens: target token ids, int64 [B, n].
        parents: index of the parent node in the same row, int64 [B, n]; -1 for the root.
        depths: distance from the root, int64 [B, n].
        log_probs: natural log-probability of each node given its parent, fp32 [B, n]; 0 for the root.
        entropies: entropy in nats of the distribution each node was drawn from, fp32 [B, n]; 0 for the root,
            NaN where the policy did not compute it.
        sizes: number of valid nodes, root included, int64 [B].
        drawn_from: for sampled children, whose siblings are in the order of their draws. None: they are the
            drafter's most probable tokens.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    depths: torch.Tensor
    log_probs: torch.Tensor
    entropies: torch.Tensor
    sizes: torch.Tensor
    drawn_from: DrawnFrom | None = None
    _ancestors: torch.Tensor | None = field(default=None, repr=False)  # cached by ancestors()
    _joint: torch.Tensor | None = field(default=None, repr=False)  # cached by joint_log_probs()
    _is_full: bool = field(default=False, repr=False)  # known to have no padding

    @classmethod
    def root_only(cls, tokens: torch.Tensor) -> "TokenTree":
        """Return trees of one node each, from root tokens [B]."""
        tokens = tokens[:, None]  # [B, 1]
        zeros = torch.zeros_like(tokens)  # [B, 1]
        nothing = zeros.float()  # [B, 1]
        ones = torch.ones_like(tokens)  # [B, 1]
        itself = ones.bool()[:, :, None]  # [B, 1, 1]
        return cls(tokens, zeros - 1, zeros, nothing, nothing, ones[:, 0], None, itself, nothing, True)

    @property
    def width(self) -> int:
        """Return the number of nodes of the widest row, root included."""
        return self.tokens.shape[1]

    @property
    def valid(self) -> torch.Tensor:
        """Return the mask of the nodes that are not padding, bool [B, n]."""
        return torch.arange(self.width, device=self.sizes.device) < self.sizes[:, None]

    def ancestors(self) -> torch.Tensor:
        """Return bool [B, n, n]: row i is True at the ancestors of node i and at i itself."""
        if self._ancestors is None:
            n = self.width
            itself = torch.eye(n, dtype=torch.bool, device=self.tokens.device)  # [n, n]
            has_parent = self.valid & (self.parents >= 0)  # [B, n]
            above = self.parents.clamp(min=0)[:, :, None].expand(-1, -1, n)  # [B, n, n]
            found = itself.expand(len(self.tokens), n, n)  # [B, n, n]
            for _ in range(int(self.depths.max())):  # each round adds one generation
                found = itself | (found.gather(1, above) & has_parent[:, :, None])
            object.__setattr__(self, "_ancestors", found)
        return self._ancestors

    def joint_log_probs(self) -> torch.Tensor:
        """Return the log-probability of the path to each node given the root, fp32 [B, n]; -inf for padding.

        Added up from the root downwards, so that rounding never makes a node more probable than its parent.
        """
        if self._joint is None:
            parents, is_root = self.parents.clamp(min=0), self.parents < 0  # [B, n]
            joint = torch.zeros_like(self.log_probs)  # [B, n]
            for _ in range(int(self.depths.max())):  # each round is right for one more generation
                joint = (joint.gather(1, parents) + self.log_probs).masked_fill(is_root, 0.0)
            object.__setattr__(self, "_joint", joint.masked_fill(~self.valid, -torch.inf))
        return self._joint

    def append(
        self,
        parents: torch.Tensor,
        tokens: torch.Tensor,
        log_probs: torch.Tensor,
        entropies: torch.Tensor | None = None,
        counts: torch.Tensor | None = None,
    ) -> "TokenTree":
        """Return the tree with one more layer. Nodes keep their indices; the new ones follow the valid nodes
        of their row.

        Args:
            parents: nodes of the deepest layer that get children, int64 [B, f]; a node with several children
                is repeated.
            tokens, log_probs, entropies: [B, f], as the attributes; entropies are optional.
            counts: how many of the f new nodes are valid in each row (they come first), int64 [B]. None: all.
        """
        batch, added = parents.shape
        if batch == 1 and counts is not None:  # a single tree needs no padding
            added, counts = int(counts), None
            parents, tokens, log_probs = parents[:, :added], tokens[:, :added], log_probs[:, :added]
            entropies = None if entropies is None else entropies[:, :added]
        if kernels.is_native(tokens):
            append_layer = kernels.append_layer
        else:
            from drafttrain.trees.operators import append_layer
        fields = append_layer(self.fields(), parents, tokens, log_probs, entropies)
        is_full = counts is None and (self._is_full or batch == 1 or bool((self.sizes == self.width).all()))
        grown = TokenTree.of_fields(fields, self.sizes + added, is_full=is_full)
        if grown._is_full:
            return grown
        new = torch.arange(added, device=tokens.device).expand(batch, -1)  # [B, f]
        new = new < (added if counts is None else counts[:, None])  # [B, f]
        return grown._keep(torch.cat([self.valid, new], 1))

    def select(self, keep: torch.Tensor) -> "TokenTree":
        """Return the sub-tree of the nodes marked in keep, bool [B, n], whose ancestors are all marked too.
        Nodes are renumbered in the same order; the root is always kept."""
        keep = keep & self.valid  # [B, n]
        keep[:, 0] = True
        if keep.all():
            return self
        orphaned = (self.ancestors() & ~keep[:, None]).any(-1)  # [B, n]
        return self._keep(~orphaned)

    def take(self, nodes: torch.Tensor) -> "TokenTree":
        """Return the sub-tree of these nodes, int64 [B, w], ascending, which include the root and the parents
        of all others. They are renumbered in the same order. The trees must have no padding."""
        if not kernels.is_native(nodes):
            return self._keep(torch.zeros_like(self.tokens, dtype=torch.bool).scatter_(1, nodes, True))
        sizes = torch.full_like(self.sizes, nodes.shape[1])
        drawn = self.drawn_from and self._moved_drawn_from(nodes, sizes)
        return TokenTree.of_fields(kernels.take_nodes(self.fields(), nodes), sizes, drawn)

    def follow(self, choices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the longest path of each row on which each token is the choice [B, n] at its parent: its
        nodes from the root on, int64 [B, m] (shorter paths are padded with other nodes), its length, and the
        choice at its last node, int64 [B] each."""
        own = self.tokens, self.parents, self.depths
        if kernels.is_native(choices):
            return kernels.follow_choices(*own, choices)
        from drafttrain.trees.operators import follow_choices

        return follow_choices(*own, self.ancestors(), choices)

    def fields(self) -> tuple[torch.Tensor, ...]:
        """Return the fields of native calls: six [B, n], with joint log-probabilities last, and ancestors."""
        own = self.tokens, self.parents, self.depths, self.log_probs, self.entropies
        return *own, self.joint_log_probs(), self.ancestors()

    @classmethod
    def of_fields(
        cls,
        fields: Sequence[torch.Tensor],
        sizes: torch.Tensor,
        drawn_from: DrawnFrom | None = None,
        is_full: bool = False,
    ) -> "TokenTree":
        """Return trees of these sizes [B] from the fields of a native call (`kernels/trees.py`)."""
        *own, joint, ancestors = fields
        return cls(*own, sizes, drawn_from, ancestors, joint, is_full)

    def _moved_drawn_from(self, order: torch.Tensor, sizes: torch.Tensor) -> DrawnFrom:
        probs, ids = self.drawn_from.probs, self.drawn_from.ids  # [B, n, K]
        index = order[:, :, None].expand(-1, -1, probs.shape[2])  # [B, w, K]
        padding = torch.arange(order.shape[1], device=order.device) >= sizes[:, None]  # [B, w]
        return DrawnFrom(probs.gather(1, index).masked_fill(padding[:, :, None], 0.0), ids.gather(1, index))

    def _keep(self, keep: torch.Tensor) -> "TokenTree":
        """Return the trees of the nodes marked in `keep` [B, n], which is closed under parents."""
        order, sizes = marked_nodes(keep)  # [B, w] old index of each node, [B]
        if len(sizes) == 1 and kernels.is_native(keep):
            return self.take(order)
        from drafttrain.trees.ragged import keep_nodes  # for batches, and without native calls

        drawn = self.drawn_from and self._moved_drawn_from(order, sizes)
        return TokenTree.of_fields(keep_nodes(self.fields(), keep, order, sizes), sizes, drawn)


def marked_nodes(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices of the nodes marked in bool [B, n], in order.

    Returns:
        nodes int64 [B, f], padded with the root, and how many of each row are no padding, int64 [B].
    """
    counts = mask.sum(1)  # [B]
    if len(mask) == 1:
        return mask[0].nonzero().T, counts
    width = int(counts.max())
    nodes = (~mask).byte().argsort(dim=1, stable=True)[:, :width]  # [B, f]
    return nodes.masked_fill(torch.arange(width, device=mask.device) >= counts[:, None], 0), counts
