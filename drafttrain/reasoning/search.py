"""Search strategies for a tree of thoughts. Each is a generator of rounds that returns the best leaf, which
the closing generation continues, or None if every branch has failed.

`bfs` is SEED's Algorithm 1. The others also use only `ThoughtTree.expand`, which generates thoughts and
evaluates them, and the `worth` of the states that it returns.
"""

import dataclasses
import difflib
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from drafttrain.reasoning.lines import Rounds
from drafttrain.reasoning.tree import State, ThoughtTree
from drafttrain.utils.errors import UserError
from drafttrain.utils.ranges import check_ranges, setting


class Search(Protocol):
    """A search strategy: it decides which states are expanded next."""

    votes: ClassVar[bool]  # whether it compares only states that are evaluated together, as votes need

    def run(self, tree: ThoughtTree, breadth: int) -> Rounds[State | None]:
        """Grow the tree and return the best leaf."""


@dataclass(frozen=True)
class BreadthFirst:
    """Breadth-first search (Algorithm 1): the best `breadth` states of each level are expanded."""

    votes: ClassVar[bool] = True

    def run(self, tree: ThoughtTree, breadth: int) -> Rounds[State | None]:
        states = [tree.root]  # S_0
        for _ in range(tree.steps):
            evaluated = yield from tree.expand(states)
            if not evaluated:
                break
            states = best(evaluated, breadth)  # whose scores have the largest sum
        return None if states[0] is tree.root else states[0]


@dataclass(frozen=True)
class DepthFirst:
    """Depth-first search, best child first; children below the threshold are pruned. The first leaf on the
    last level is the result; if none is reached, the best of the deepest states is.

    Attributes:
        threshold: minimum worth of a state that is followed.
        expansions: maximum number of expanded states.
    """

    threshold: float = setting(0.5, ge=0, le=1)
    expansions: int = setting(64, ge=1)
    votes: ClassVar[bool] = True

    def run(self, tree: ThoughtTree, breadth: int) -> Rounds[State | None]:
        stack, deepest = [tree.root], []
        for _ in range(self.expansions):
            if not stack or stack[-1].depth == tree.steps:
                break
            evaluated = yield from tree.expand([stack.pop()])
            deepest = _deepest(evaluated, deepest)
            stack += reversed([one for one in best(evaluated) if one.worth >= self.threshold])
        return stack[-1] if stack and stack[-1].depth == tree.steps else next(iter(best(deepest)), None)


@dataclass(frozen=True)
class AStar:
    """A*: the next state to expand has the lowest cost so far plus expected cost to the last level. A thought
    costs 1 - its worth, and those to come are expected to cost as much as the newest one.

    Attributes:
        weight: of the expected cost; with 0 the first leaf is one of the cheapest paths.
        expansions: maximum number of expanded states.
    """

    weight: float = setting(1.0, ge=0)
    expansions: int = setting(64, ge=1)
    votes: ClassVar[bool] = False

    def run(self, tree: ThoughtTree, breadth: int) -> Rounds[State | None]:
        queue, deepest = [(0.0, 0, 0.0, tree.root)], []  # estimate, order of arrival, cost, state
        arrived = 0
        for _ in range(self.expansions):
            if not queue or queue[0][-1].depth == tree.steps:
                break
            *_, cost, state = heapq.heappop(queue)
            evaluated = yield from tree.expand([state])
            deepest = _deepest(evaluated, deepest)
            for child in evaluated:
                arrived += 1
                spent, last = cost + 1 - child.worth, 1 - child.worth
                estimate = spent + self.weight * last * (tree.steps - child.depth)
                heapq.heappush(queue, (estimate, arrived, spent, child))
        if queue and queue[0][-1].depth == tree.steps:
            return queue[0][-1]
        return next(iter(best(deepest)), None)


@dataclass
class Node:
    """A state in Monte Carlo tree search.

    Attributes:
        total: sum of the worths on the path from the root.
        visits, value: number of values backed up through it, and their sum.
    """

    state: State
    parent: "Node | None" = None
    total: float = 0.0
    children: list["Node"] = field(default_factory=list)
    visits: int = 0
    value: float = 0.0

    def bound(self, explore: float) -> float:
        """Return the upper confidence bound of its value."""
        return self.value / self.visits + explore * math.sqrt(math.log(self.parent.visits) / self.visits)


@dataclass(frozen=True)
class MonteCarlo:
    """Monte Carlo tree search (UCT) with the state evaluator in place of simulations: a round expands one
    leaf, and the mean worth on the path to each new state is backed up. The leaf on the last level with the
    highest mean worth on its path is the best.

    Attributes:
        rounds: number of leaf selections.
        explore: weight of a child's uncertainty when one is selected.
    """

    rounds: int = setting(24, ge=1)
    explore: float = setting(0.5, ge=0)
    votes: ClassVar[bool] = False

    def run(self, tree: ThoughtTree, breadth: int) -> Rounds[State | None]:
        root = Node(tree.root, visits=1)
        reached: list[Node] = []
        for _ in range(self.rounds):
            node = root
            while node.children:
                node = max(node.children, key=lambda child: child.bound(self.explore))
            if node.state.depth == tree.steps:
                _back_up(node)
                continue
            evaluated = yield from tree.expand([node.state])
            node.children = [Node(state, node, node.total + state.worth) for state in evaluated]
            reached += node.children
            for child in node.children:
                _back_up(child)
            if not node.children and not _prune(node).children:  # nothing is left to continue
                break
        deepest = max((node.state.depth for node in reached), default=0)
        leaves = [node for node in reached if node.state.depth == deepest]
        return max(leaves, key=lambda node: node.total).state if leaves else None


SEARCHES: dict[str, type] = {"bfs": BreadthFirst, "dfs": DepthFirst, "astar": AStar, "mcts": MonteCarlo}


def parse_search(text: str) -> Search:
    """Return the search that a text such as `bfs` or `mcts:rounds=40,explore=1` names.

    Raises:
        UserError: no such search or setting, or a value out of range.
    """
    name, _, rest = text.partition(":")
    if name not in SEARCHES:
        close = difflib.get_close_matches(name, SEARCHES, 1)
        remedy = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"search: must be one of {', '.join(SEARCHES)}, got {name}{remedy}")
    kinds = {item.name: type(item.default) for item in dataclasses.fields(SEARCHES[name])}
    settings = {}
    for key, _, value in (part.partition("=") for part in filter(None, rest.split(","))):
        if key not in kinds:
            known = f"one of {', '.join(kinds)}" if kinds else "left out"
            raise UserError(f"search: settings of {name} must be {known}, got {key}")
        try:
            settings[key] = kinds[key](value)
        except ValueError:
            kind = "a whole number" if kinds[key] is int else "a number"
            raise UserError(f"search: {key} must be {kind}, got {value!r}") from None
    search = SEARCHES[name](**settings)
    check_ranges(search, "search")
    return search


def best(states: Sequence[State], n: int | None = None) -> list[State]:
    """Return the n states of highest worth (None: all), best first; equal states keep their order."""
    return sorted(states, key=lambda state: -state.worth)[:n]


def _deepest(states: list[State], others: list[State]) -> list[State]:
    """Return the states of the deeper of two levels, or of both if they are equally deep."""
    if states and others and states[0].depth == others[0].depth:
        return others + states
    return max(others, states, key=lambda level: level[0].depth if level else 0)


def _back_up(node: Node) -> None:
    """Add the mean worth on the path to a node to it and its ancestors."""
    value = node.total / node.state.depth
    above: Node | None = node
    while above is not None:
        above.visits += 1
        above.value += value
        above = above.parent


def _prune(node: Node) -> Node:
    """Remove a node that cannot be continued, and parents without another child; return the first that stays,
    which is the root at the latest."""
    while node.parent is not None and not node.children:
        node.parent.children.remove(node)
        node = node.parent
    return node
