"""Replay a pipeline against a known text: greedy and seeded texts do not depend on the drafts, so one process
can grow the trees of any number of stages against a text, without the target's blocks.

The hits are those of the real run: layers that enter the first group in timestep t leave the last of n groups
at the end of timestep t + n - 1, and the tokens that they leave with are the text's. `tests/pipeline` holds
both equal.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from drafttrain.inference.session import DRAFT_SLOTS
from drafttrain.pipeline.best_first import BestFirstTree
from drafttrain.pipeline.prediction import Counting, TimedTree, draft, follows_prompt
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.interface import TreePolicy
from drafttrain.trees.tree import TokenTree

_NO_TOKEN, _TOGETHER = -1, 16  # _TOGETHER: nodes per forward of the drafter


@dataclass
class Timestep:
    """The work of one timestep.

    Attributes:
        drafted: nodes that each drafting step expands.
        nodes: those that each group runs, from the first group to the last; 0: it rests.
        tokens: number of tokens that leave the last group.
        hits: how many of them were in the tree.
    """

    drafted: list[int]
    nodes: list[int]
    tokens: int = 0
    hits: int = 0


@dataclass
class Trace:
    """All timesteps of a text.

    Attributes:
        steps: after the prompt has left the last group, in order.
        beside: before, while the tree follows the prompt through the groups after the first one.
    """

    steps: list[Timestep] = field(default_factory=list)
    beside: list[Timestep] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Return how many tokens left the last group, with the first if the tree follows the prompt."""
        return sum(step.tokens for step in self.steps)

    @property
    def hits(self) -> int:
        """Return how many of these tokens were in the tree."""
        return sum(step.hits for step in self.steps)


@dataclass
class Round:
    """A static tree and its verification.

    Attributes:
        drafted: nodes that each drafting step expands.
        nodes: nodes that are verified, root included.
        hits: number of the text's tokens that were in it.
        judged: number of the text's tokens that could be hits; the target's token after a path that reaches
            the deepest layer could not.
    """

    drafted: list[int]
    nodes: int
    hits: int
    judged: int


class _Foreseen(TimedTree):
    """A prediction tree that skips the drafter's forwards over layers without the text's token, which a miss
    will discard. Their nodes get the candidate -1, which no text has, with equal probabilities."""

    ahead: Sequence[int] = ()  # tokens of the text after the root

    @property
    def is_lost(self) -> bool:
        """Return whether the text is not in the deepest layer."""
        return _followed(self.tree, self.ahead[: self.depth]) < self.depth

    def expand(self) -> int:
        nodes = self.frontier()
        if self._known[nodes[0]] or not self.is_lost:
            return super().expand()
        self._tokens[nodes], self._log_probs[nodes], self._known[nodes] = _NO_TOKEN, 0.0, True
        return len(nodes)

    def advance(self, token: int, tapped: torch.Tensor) -> bool:
        self.ahead = self.ahead[1:]
        return super().advance(token, tapped)

    def _run(self, nodes: torch.Tensor) -> torch.Tensor:
        places = (self._tokens[nodes, 0] != _NO_TOKEN).nonzero()[:, 0]
        return nodes[: int(places[-1]) + 1 if len(places) else 0]  # as all before the last have slots


class _Late(_Foreseen):
    """A lazy tree for a drafter that reads tokens alone, whose output does not depend on when it runs: it
    runs when a layer is grown, and only over nodes whose children may be among the layer's `width` most
    probable ones. A child is no more probable than its parent."""

    def expand(self) -> int:
        nodes = self.frontier()
        if self._known[nodes[0]]:
            return 0
        self._tokens[nodes], self._log_probs[nodes], self._known[nodes] = _NO_TOKEN, -torch.inf, True
        return len(nodes)

    def grow(self, max_depth: int) -> bool:
        nodes = self.frontier()
        if self.depth < max_depth and self._known[nodes[0]]:
            if self.is_lost:
                self._log_probs[nodes] = 0.0
            else:
                self._ask(nodes)
        return super().grow(max_depth)

    def advance(self, token: int, tapped: torch.Tensor) -> bool:
        self._ask(torch.tensor([0]))  # its keys are committed
        return super().advance(token, tapped)

    def _ask(self, nodes: torch.Tensor) -> None:
        joint = self.tree.joint_log_probs()[0, nodes]  # [f]
        order = joint.argsort(descending=True)  # [f]
        nodes, joint = nodes[order], joint[order]
        for first in range(0, len(nodes), _TOGETHER):
            best = (joint[:first, None] + self._log_probs[nodes[:first]]).flatten()  # [n]
            if len(best) >= self.width and best.topk(self.width).values[-1] > joint[first]:
                return
            asked = nodes[first : first + _TOGETHER]
            asked = asked[self._tokens[asked, 0] == _NO_TOKEN].sort().values  # [m]
            if len(asked):
                log_probs, ids = self.drafter.top(self.state, self.tree, asked[None], self.children)
                self._log_probs[asked] = log_probs[0]  # [m, c]
                self._tokens[asked] = self.drafter.to_target(ids)[0]  # [m, c]


def _foreseen(tapped: torch.Tensor) -> type[_Foreseen]:
    """Return the tree class that skips the most forwards of a drafter that reads these tapped states."""
    return _Foreseen if tapped.shape[1] else _Late


def replay_policy(
    drafter: Drafter, prompt: Sequence[int], text: Sequence[int], tapped: torch.Tensor, policy: TreePolicy
) -> list[Round]:
    """Grow static trees by a policy against a text; arguments as `replay`."""

    def grow(state: Any, root: int, left: int) -> tuple[TokenTree, list[int]]:
        counting = Counting(drafter)
        tree = policy.grow(counting, state, torch.tensor([root], device=tapped.device))
        return tree, counting.sizes

    return _rounds(drafter, prompt, text, tapped, grow, policy.max_depth, DRAFT_SLOTS)


def replay_static(
    drafter: Drafter,
    prompt: Sequence[int],
    text: Sequence[int],
    tapped: torch.Tensor,
    depth: int,
    width: int,
    children: int,
) -> list[Round]:
    """Grow static trees of `depth` layers against a text, each layer as in the tree in flight; arguments as
    `replay`. Layers without the text's token have the right number of nodes, not the right nodes."""

    def grow(state: Any, root: int, left: int) -> tuple[TokenTree, list[int]]:
        tree = _foreseen(tapped)(drafter, state, root, width, children, tapped.device)
        tree.ahead, drafted = text[len(text) - left :], []
        for _ in range(depth):
            drafted.append(tree.expand())
            tree.grow(depth)
        return tree.tree, drafted

    return _rounds(drafter, prompt, text, tapped, grow, depth, depth * width)


@torch.no_grad()
def _rounds(
    drafter: Drafter,
    prompt: Sequence[int],
    text: Sequence[int],
    tapped: torch.Tensor,
    grow: Callable[[Any, int, int], tuple[TokenTree, list[int]]],
    depth: int,
    max_nodes: int,
) -> list[Round]:
    """Replay a text with a new tree after each verification.

    Args:
        grow: takes the drafter's state, the root's token and the number of the text's tokens after it;
            returns a tree, and how many nodes each draft step expanded.
        depth: maximum depth of a tree.
    """
    n, rounds, place = len(prompt), [], 0
    state = drafter.new_state(1, n + len(text) + max_nodes)
    ids = torch.tensor([[*prompt, *text]], device=tapped.device)  # [1, t]

    def read(first: int, last: int) -> None:
        count = ids.new_tensor([last - first])
        drafter.update(state, ids[:, first:last], tapped[None, first:last], count)

    read(0, n)
    while place + 1 < len(text):
        left = len(text) - place - 1
        tree, drafted = grow(state, text[place], left)
        hits = _followed(tree, text[place + 1 :])
        emitted = min(hits + 1, left)  # the target's own token after them
        rounds.append(Round(drafted, tree.width, hits, min(emitted, depth)))
        read(n + place, n + place + emitted)
        place += emitted
    return rounds


def _followed(tree: TokenTree, text: Sequence[int]) -> int:
    """Return how many tokens at the start of a text are a path below the root of the tree."""
    tokens, parents, node = tree.tokens[0].tolist(), tree.parents[0].tolist(), 0
    for i, token in enumerate(text):
        found = [j for j, above in enumerate(parents) if above == node and tokens[j] == token]
        if not found:
            return i
        node = found[0]
    return len(text)


@torch.no_grad()
def replay(
    drafter: Drafter,
    prompt: Sequence[int],
    text: Sequence[int],
    tapped: torch.Tensor,
    groups: int,
    width: int,
    children: int,
    layers: int = 1,
    skip_lost: bool = False,
    best_first: bool = False,
    limit: int | None = None,
) -> Trace:
    """Grow the prediction trees of a pipeline of `groups` stages against a text.

    Args:
        text: tokens after the prompt.
        tapped: the target's tapped states at all tokens of both but the last, [n, K·H].
        width, children: nodes per layer, and candidates per node.
        layers: that the drafter adds in a timestep.
        skip_lost: run the drafter neither for layers that a miss will discard nor, if it reads tokens alone,
            for nodes without children, which is several times faster with many stages. Hits and timesteps are
            the same; the number of nodes of such layers that survive the hits before the miss is not.
        best_first: grow a `BestFirstTree`, for which nothing is skipped.
        limit: most tokens that the text could have had; None: those that it has. No tree is deeper.
    """
    follows = follows_prompt(tapped.shape[1] > 0, prompt)
    end = (len(text) if limit is None else limit) + follows
    if follows:
        prompt, text = prompt[:-1], [prompt[-1], *text]
    n, trace, place = len(prompt), Trace(), 0
    state = drafter.new_state(1, n + len(text) + groups * layers)
    ids = torch.tensor([list(prompt)], device=tapped.device)  # [1, n]
    drafter.update(state, ids, tapped[None, :n], torch.tensor([n], device=tapped.device))
    kind = _foreseen(tapped) if skip_lost else TimedTree
    own = drafter, state, text[0], width, children, tapped.device
    tree = BestFirstTree(groups, *own) if best_first else kind(*own)
    if isinstance(tree, _Foreseen):
        tree.ahead = text[1:]
    tree.take()  # the root is the first to enter
    while place + 1 < len(text):
        nodes = (tree.now - tree.entered).bincount(minlength=groups).tolist()  # by groups passed
        drafted = list(draft(tree, layers, end - place - 2))
        steps = trace.beside if follows and tree.now < groups else trace.steps
        steps.append(step := Timestep(drafted, nodes))
        while tree.now == tree.entered[0] + groups - 1:
            place, step.tokens = place + 1, step.tokens + 1
            if place + 1 == len(text):
                return trace
            step.hits += tree.advance(text[place], tapped[None, n + place - 1])
        tree.grow(end - place - 2)
        tree.take()
    return trace
