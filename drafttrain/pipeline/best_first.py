"""A prediction tree that grows where it saves most, not by the next layer alone (ours).

PipeDec's tree never goes back: a candidate that was not among the best of its layer when that layer entered
the pipeline is lost, even if hits make its path probable later, and its token costs a restart. Here a node
may also enter after nodes below its siblings. It leaves the last stage later than they do, but earlier than
after a restart.

With n groups of stages, let T be the timestep at whose end the token after a node is known if all nodes above
it are hits. A child that enters in the timestep after t is known at the end of t + n, after a miss of its
parent at the end of T + n. So it saves min(n, T - t) timesteps if it is a hit. Candidates are ranked by the
probability of their path times the timesteps that they save. Only the chain of most probable tokens always
grows: no bubble follows it, however flat the drafter's distributions are.
"""

from typing import Any

import torch

from drafttrain.pipeline.prediction import TimedTree


class BestFirstTree(TimedTree):
    """A drafter's tree for one sequence, its nodes in the order in which they enter the first stage.

    `width` is the most nodes that `grow` adds and that `expand` expands.

    Args:
        groups: number of groups of stages.
        own: as `PredictionTree` takes them.
    """

    _per_node = (*TimedTree._per_node, "_is_top")

    def __init__(self, groups: int, *own: Any):
        self.groups = groups
        super().__init__(*own)

    @property
    def depth(self) -> int:
        """Return the depth of the deepest node; 0 for a root alone."""
        return int(self.tree.depths.max())

    def expand(self) -> int:
        """Run the drafter over the best nodes that have not been expanded; return the number of nodes."""
        nodes = (~self._known).nonzero()[:, 0]  # [m]
        if len(nodes) > self.width:
            worth = self._worth()
            worth[self._end_of_chain()] = torch.inf
            nodes = nodes[worth[nodes].topk(self.width).indices].sort().values  # [f]
        return self._expand(nodes) if len(nodes) else 0

    def grow(self, max_depth: int) -> bool:
        """Append the best candidates of all nodes above `max_depth`; return whether there are any."""
        worth = self._worth()[:, None] + self._log_probs  # [n, c], -inf for candidates in the tree
        if self._known[end := self._end_of_chain()]:
            worth[end, 0] = torch.inf
        worth[self.tree.depths[0] >= max_depth] = -torch.inf
        best, places = worth.flatten().topk(min(self.width, worth.numel()))  # [w] of n * c
        places = places[best > -torch.inf].sort().values  # [f]
        if not len(places):
            return False
        parents, column = places // self.children, places % self.children
        tokens, log_probs = self._tokens[parents, column], self._log_probs[parents, column]  # [f]
        self._log_probs[parents, column] = -torch.inf
        self.tree = self.tree.append(parents[None], tokens[None], log_probs[None])
        self._lengthen(len(places))
        self._log_probs[-len(places) :] = -torch.inf
        self._is_top[-len(places) :] = column == 0
        return True

    def advance(self, token: int, tapped: torch.Tensor) -> bool:
        if not self._known[0]:  # the drafter commits the keys of the root
            self._expand(torch.zeros(1, dtype=torch.long, device=self.device))
        is_hit = super().advance(token, tapped)
        self._is_top[0] = True
        return is_hit

    def _worth(self) -> torch.Tensor:
        """Return the logarithm of what a child of each node is worth if it enters in the next timestep: the
        probability of the path to the node times the timesteps that the child saves as a hit, fp32 [n]."""
        above = self.tree.ancestors()[0]  # [n, n]
        known = (above * (self.entered + self.groups - 1)).amax(1)  # [n] the last of the path to leave
        saved = (known - self.now).clamp(1, self.groups)
        return self.tree.joint_log_probs()[0] + saved.log()

    def _end_of_chain(self) -> torch.Tensor:
        """Return the last node of the chain of most probable tokens below the root, int64 []."""
        is_off = (self.tree.ancestors()[0] & ~self._is_top).any(1)  # [n]
        return self.tree.depths[0].masked_fill(is_off, -1).argmax()

    def _run(self, nodes: torch.Tensor) -> torch.Tensor:
        slots = int(self._known.nonzero()[-1]) + 1  # up to the last node that has been expanded
        return nodes[nodes < slots]

    def _restart(self, token: int) -> None:
        super()._restart(token)
        self._log_probs.fill_(-torch.inf)
        self._is_top = torch.ones_like(self._known)  # [n] whether a node is the first candidate of its parent
