"""A stage of the pipeline: some blocks of the target, and its part of the prediction tree.

Every stage keeps the nodes of the tree that have reached it, with their keys and values after the verified
ones (PipeDec, §3.2: the cache of the model and the cache of the tree). A token of the target commits the root
and prunes the tree in the same way at all stages, so only the token has to be sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafttrain.pipeline.part import TargetPart
from drafttrain.pipeline.prediction import below, child_of, sub_tree
from drafttrain.target_lm.masks import causal
from drafttrain.trees.lists import tree_of_lists
from drafttrain.trees.tree import TokenTree
from drafttrain.utils.errors import UserError


@dataclass
class Flow:
    """New nodes of the tree on their way through the stages, parents before their children.

    Attributes:
        tokens: int64 [m].
        parents: indices of the parents in the tree, int64 [m]; -1 for the root.
        x: states after the last stage it has passed, [m, H], on its device or as they were received; None
            before the first.
    """

    tokens: torch.Tensor
    parents: torch.Tensor
    x: torch.Tensor | None = None


class Stage:
    """The blocks of a stage, their KV cache and their part of the tree, for one sequence at a time. The tree
    is on the CPU, where it costs no waiting for a GPU.

    Args:
        room: tokens of the longest sequence, drafts included.
    """

    def __init__(self, part: TargetPart, room: int):
        self.part, self.room = part, room
        self.reset()

    def reset(self, dtype: torch.dtype | None = None) -> None:
        """Begin a new sequence.

        Args:
            dtype: of keys and values; None: that of the weights.
        """
        self.cache = self.part.new_cache(self.room, dtype)
        self.tree: TokenTree | None = None  # None until the root has arrived
        self.tapped: torch.Tensor | None = None  # at the tree's nodes [1, n, taps · H]

    def prefill(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a prompt through the blocks and commit it to the cache.

        Args:
            x: its tokens int64 [n] in the first stage, else its states [n, H].

        Returns:
            states [n, H] and tapped states [n, taps · H].
        """
        n = len(x)
        order = torch.arange(n, device=self.part.device)
        out, tapped = self.part.run(self.cache, x[None].to(order.device), order, causal(n, order.device))
        self.cache.add(torch.full_like(self.cache.lengths, n), n)
        self.cache.carried.clear()
        return out[0], tapped[0]

    def compute(self, flow: Flow) -> Flow:
        """Run new nodes through the blocks; their keys and values stay in the tree's part of the cache."""
        before = 0 if self.tree is None else self.tree.width
        self._append(flow)
        out, tapped = self._run(flow, before)
        self.tapped = tapped if before == 0 else torch.cat([self.tapped, tapped], 1)
        return Flow(flow.tokens, flow.parents, out[0])

    def _run(self, flow: Flow, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the nodes of the tree from `first` on, those of the flow, as `TargetPart.run` does."""
        x = flow.tokens if self.part.is_first else flow.x
        nodes = x[None], self.tree.depths[0, first:], self.tree.ancestors()[0, first:]
        return self.part.run(self.cache, *(one.to(self.part.device) for one in nodes), first)

    def _append(self, flow: Flow) -> None:
        """Append nodes to the tree, as many at a time as have their parents in it."""
        tokens, parents = flow.tokens, flow.parents
        if self.tree is None:
            self.tree, tokens, parents = TokenTree.root_only(tokens[:1]), tokens[1:], parents[1:]
        above = self.tree.width  # parents before it are in the tree already
        while len(tokens):
            own = (parents >= above).nonzero()[:1, 0]  # the first whose parent is not there yet
            size = int(own) if len(own) else len(tokens)
            if not size:
                raise UserError(
                    "stages: must continue each other's trees, got nodes without parents; start all ranks "
                    "with the same recipe and files"
                )
            own = tokens[None, :size]  # [1, s]
            self.tree = self.tree.append(parents[None, :size], own, torch.zeros_like(own, dtype=torch.float))
            above, tokens, parents = self.tree.width, tokens[size:], parents[size:]

    def compute_tree(self, flow: Flow) -> Flow:
        """Run a whole tree through the blocks, root first."""
        tokens, parents = flow.tokens.tolist(), flow.parents.tolist()
        self.tree = tree_of_lists([tokens], [parents], flow.tokens.device)
        out, self.tapped = self._run(flow, 0)
        return Flow(flow.tokens, flow.parents, out[0])

    def commit(self, path: Sequence[int]) -> None:
        """Commit the nodes of an accepted path, root first, to the cache; drop the tree's other nodes."""
        nodes = torch.tensor([path], device=self.part.device)  # [1, m]
        self.cache.commit(nodes, nodes.new_tensor([len(path)]))
        self.cache.carried.clear()

    def advance(self, token: int, out: Flow | None = None) -> Flow | None:
        """Commit the root, move it to the target's token after it, and prune the tree.

        Args:
            out: what this stage has just computed, the last nodes of its tree.

        Returns:
            what is left of `out`, with the indices of the new tree; None if nothing is.
        """
        before, hit = (
            self.tree.width - (0 if out is None else len(out.tokens)),
            child_of(self.tree, 0, token),
        )
        keep = below(self.tree, hit)  # [w]
        self.cache.advance(keep.to(self.part.device))
        if "positions" in self.cache.carried:
            self.cache.carried["positions"] = self.cache.carried["positions"][:, keep]
        if hit is None:
            self.tree = self.tapped = None
            return None
        self.tree, self.tapped = sub_tree(self.tree, keep), self.tapped[:, keep]
        if out is None or before > keep[-1]:
            return None
        left = keep[keep >= before]  # of what was computed
        parents = self.tree.parents[0, len(keep) - len(left) :]
        return Flow(out.tokens[left - before], parents, out.x[left - before])

    def root_tapped(self) -> torch.Tensor:
        """Return the tapped states at the tree's root, [1, taps · H]."""
        return self.tapped[:, 0]
