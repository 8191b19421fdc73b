"""The dynamic prediction tree (PipeDec, §3.3): grown by a layer in each timestep, or by several (ours), cut
by each token of the target.

A layer has the `width` most probable nodes, by joint log-probability B = M log P, of `children` candidates
for each node of the layer above. The target's token after the root either is one of the root's children (a
hit: only that child's sub-tree stays) or is not (a miss: the tree begins again with that token).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from drafttrain.trees.drafter import Drafter
from drafttrain.trees.expand import next_layer
from drafttrain.trees.tree import TokenTree


@dataclass
class Layers:
    """New nodes of a tree, parents before their children.

    Attributes:
        tokens: int64 [m].
        parents: their indices in the tree, int64 [m]; -1 for the root.
    """

    tokens: torch.Tensor
    parents: torch.Tensor


class PredictionTree:
    """A drafter's tree for one sequence. One timestep is `expand`, `advance` for each token of the target,
    `grow` and `take`; a drafter that is faster than a stage may `grow` and `expand` before that (ours).

    Candidates of the deepest layer are kept when all of its children leave the tree, so that it grows again
    without another forward of the drafter (ours; the paper does not say what happens then).

    Args:
        state: the drafter's, for the text before the root.
        root: the last emitted token.
        width: nodes of a layer at most.
        children: candidates for each node.
    """

    _per_node = ("_log_probs", "_tokens", "_known")

    def __init__(
        self,
        drafter: Drafter,
        state: Any,
        root: int,
        width: int,
        children: int,
        device: torch.device | str = "cpu",
    ):
        self.drafter, self.state, self.width, self.device = drafter, state, width, device
        self.children = min(children, drafter.draft_vocab_size)
        self._restart(root)

    @property
    def root(self) -> int:
        """Return the token of the root."""
        return int(self.tree.tokens[0, 0])

    @property
    def depth(self) -> int:
        """Return the depth of the deepest layer; 0 for a root alone."""
        return int(self.tree.depths[0, -1])

    def frontier(self) -> torch.Tensor:
        """Return the nodes of the deepest layer, int64 [f]."""
        return (self.tree.depths[0] == self.tree.depths[0, -1]).nonzero()[:, 0]

    def expand(self) -> int:
        """Run the drafter over the deepest layer, unless that has been done; return the number of nodes."""
        nodes = self.frontier()
        return 0 if self._known[nodes[0]] else self._expand(nodes)

    def _expand(self, nodes: torch.Tensor) -> int:
        log_probs, ids = self.drafter.top(self.state, self.tree, nodes[None], self.children)  # [1, f, c]
        self._log_probs[nodes], self._tokens[nodes] = log_probs[0], self.drafter.to_target(ids)[0]
        self._known[nodes] = True
        return len(nodes)

    def grow(self, max_depth: int) -> bool:
        """Append the next layer, if the deepest one has been expanded and is not at `max_depth`; return
        whether one was appended."""
        nodes = self.frontier()
        if self.depth >= max_depth or not self._known[nodes[0]]:
            return False
        before = self.tree.width
        log_probs, tokens = self._log_probs[nodes][None], self._tokens[nodes][None]  # [1, f, c]
        self.tree = next_layer(self.tree, nodes[None], log_probs, tokens, self.width)
        self._lengthen(self.tree.width - before)
        return True

    def _lengthen(self, added: int) -> None:
        for name in self._per_node:
            values = getattr(self, name)
            setattr(self, name, torch.cat([values, values.new_zeros(added, *values.shape[1:])]))

    def take(self) -> Layers | None:
        """Return the nodes added since the last call, root first after a restart; None without any."""
        first, self._taken = self._taken, self.tree.width
        if first == self._taken:
            return None
        return Layers(self.tree.tokens[0, first:], self.tree.parents[0, first:])

    def advance(self, token: int, tapped: torch.Tensor) -> bool:
        """Move the root to the target's token after it and prune the tree; return whether that was a hit.

        Args:
            tapped: the target's tapped states at the root, [1, K·H].
        """
        hit = child_of(self.tree, 0, token)
        keep = below(self.tree, hit)
        self.drafter.prune(self.state, self.tree.tokens[:, 0], tapped, self._run(keep))
        if hit is None:
            self._restart(token)
            return False
        self.tree = sub_tree(self.tree, keep)
        self._taken = int((keep < self._taken).sum())
        for name in self._per_node:
            setattr(self, name, getattr(self, name)[keep])
        return True

    def _run(self, nodes: torch.Tensor) -> torch.Tensor:
        """Return those of the nodes that have slots in the drafter's state."""
        return nodes

    def _restart(self, token: int) -> None:
        root = torch.tensor([token], device=self.device)  # [1]
        self.tree = TokenTree.root_only(root)
        self._tokens = root.new_zeros(1, self.children)  # [n, c] candidates after each node
        self._log_probs = self._tokens.float()  # [n, c]
        self._known = torch.zeros_like(root, dtype=torch.bool)  # [n] whether a node has been expanded
        self._taken = 0  # nodes, the first ones, that `take` has returned


class TimedTree(PredictionTree):
    """A prediction tree that knows when its nodes enter the pipeline.

    Attributes:
        now: number of calls of `take`, which is the number of the current timestep.
        entered: timestep in which each node enters the first stage, int64 [n].
    """

    _per_node = (*PredictionTree._per_node, "entered")
    now = 0

    def take(self) -> Layers | None:
        self.now += 1
        return super().take()

    def _lengthen(self, added: int) -> None:
        super()._lengthen(added)
        self.entered[-added:] = self.now + 1

    def _restart(self, token: int) -> None:
        super()._restart(token)
        self.entered = torch.full_like(self.tree.tokens[0], self.now + 1)  # [1]


def follows_prompt(reads_states: bool, prompt: Sequence[int]) -> bool:
    """Return whether the tree in flight begins at the prompt's last token and follows the others through the
    stages (ours): a drafter that reads tokens alone need not wait for the target's states.

    Args:
        reads_states: whether the drafter reads tapped states of the target.
    """
    return not reads_states and len(prompt) > 1


def draft(tree: PredictionTree, layers: int, max_depth: int) -> Iterator[int]:
    """Run the draft steps of a timestep, so that the tree can grow by this many layers; yield how many nodes
    each expands. The last layer is appended once the target's token is known."""
    for step in range(layers):
        if step and not tree.grow(max_depth):
            return
        if expanded := tree.expand():
            yield expanded


def child_of(tree: TokenTree, node: int, token: int) -> int | None:
    """Return the index of a node's child with this token, None without one."""
    found = ((tree.tokens[0] == token) & (tree.parents[0] == node)).nonzero()[:, 0]
    return int(found[0]) if len(found) else None


def below(tree: TokenTree, node: int | None) -> torch.Tensor:
    """Return a node and all nodes below it, int64 [w], in ascending order; an empty tensor for None."""
    if node is None:
        return tree.tokens.new_zeros(0)
    return tree.ancestors()[0, :, node].nonzero()[:, 0]


def sub_tree(tree: TokenTree, keep: torch.Tensor) -> TokenTree:
    """Return the nodes found by `below` as a separate tree, in the same order: depths and joint
    log-probabilities are relative to the first, its root (PipeDec, §3.3.4). All ranks wait for this."""
    tokens, parents, depths, log_probs, entropies, joint = (
        values.index_select(1, keep)  # [1, w]
        for values in (
            tree.tokens,
            tree.parents,
            tree.depths,
            tree.log_probs,
            tree.entropies,
            tree.joint_log_probs(),
        )
    )
    parents = torch.searchsorted(keep, parents)  # new indices; the root's own parent is gone
    parents[:, 0], log_probs[:, 0], entropies[:, 0] = -1, 0.0, 0.0
    return TokenTree(
        tokens,
        parents,
        depths - depths[:, :1],
        log_probs,
        entropies,
        torch.full_like(tree.sizes, len(keep)),
        _ancestors=tree.ancestors().index_select(1, keep).index_select(2, keep),  # [1, w, w]
        _joint=joint - joint[:, :1],
    )


class Counting:
    """A wrapped drafter that records how many nodes each draft step expands."""

    grow_natively = None  # native growth would bypass the counted steps

    def __init__(self, drafter: Drafter, hold: Callable[[], None] = lambda: None):
        """
        Args:
            hold: called after each step.
        """
        self._drafter, self._hold, self.sizes = drafter, hold, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def top(
        self, state: Any, tree: TokenTree, frontier: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.sizes.append(frontier.shape[1])
        found = self._drafter.top(state, tree, frontier, k)
        self._hold()
        return found

    def expand(self, state: Any, tree: TokenTree, frontier: torch.Tensor) -> torch.Tensor:
        self.sizes.append(frontier.shape[1])
        found = self._drafter.expand(state, tree, frontier)
        self._hold()
        return found
