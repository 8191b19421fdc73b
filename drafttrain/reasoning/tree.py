"""The tree of thoughts of one problem: states, the thought generator and the state evaluator (Figure 2)."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from drafttrain.reasoning.lines import CallFailed, Line, NodePath, Rounds
from drafttrain.reasoning.tasks.task import Ask, Asking, Problem, Task, Thought

VOTE = (
    "{problem}\n\nSeveral continuations have been suggested:\n\n{choices}\n\nWhich one is best? Begin with "
    'the line "Best choice: N", where N is its number. Then compare them in one or two sentences.'
)
CHOICE = "Best choice: "
VOTE_TOKENS = 96
Think = Callable[[Problem, Sequence[Thought]], Asking[Thought]]
_CHOICE = re.compile(r"choice\b\D{0,20}(\d+)", re.IGNORECASE)


@dataclass
class State:
    """A node: the problem with the thoughts on the path from the root.

    Attributes:
        path: child index at each level from the root on.
        thoughts: one for each level.
        score: of the newest thought, by the task's scale; votes under `vote`. None: not evaluated.
        worth: the score scaled to 0 to 1, which searches compare.
        without_score: number of evaluator answers without a score; they count as the lowest.
        error: why it has no thought or no score; the branch ends here.
    """

    path: NodePath = ()
    thoughts: tuple[Thought, ...] = ()
    score: float | None = None
    worth: float = 0.0
    without_score: int = 0
    error: str | None = None

    @property
    def depth(self) -> int:
        """Return the number of thoughts."""
        return len(self.path)


@dataclass
class ThoughtTree:
    """Expands and evaluates states for a search, whose lines of calls it yields.

    Attributes:
        steps: levels of thoughts at most.
        n: thoughts generated from a state, and votes of an evaluation.
        evaluator: value (each state gets a score) or vote (for the best of those evaluated together).
        states: all of them, in the order in which they were made; the root is first.
        children: number of children that each node has had.
    """

    task: Task
    problem: Problem
    steps: int
    n: int
    evaluator: Literal["value", "vote"] = "value"
    states: list[State] = field(default_factory=lambda: [State()])
    children: Counter[NodePath] = field(default_factory=Counter)

    @property
    def root(self) -> State:
        """Return the state without thoughts."""
        return self.states[0]

    def expand(self, states: Sequence[State]) -> Rounds[list[State]]:
        """Generate n thoughts from each of these states and evaluate them; return the new states, without
        those whose calls have failed. Thoughts are scored one by one when generated, while a vote waits for
        all of them."""
        parents = [state for state in states for _ in range(self.n)]
        made = [self._child(parent) for parent in parents]
        grow = self._think if self.evaluator == "vote" else self._think_and_judge
        yield [Line(child.path, grow(child)) for child in made]
        if self.evaluator == "vote":
            yield from self._vote([child for child in made if child.error is None])
        return [child for child in made if child.error is None]

    def close(self, leaf: State) -> Rounds[State]:
        """Run the closing generation after the best leaf, and return its state."""
        closing = self._child(leaf)
        yield [Line(closing.path, self._think(closing, self.task.close))]
        return closing

    def _child(self, parent: State) -> State:
        """Return a new state below a parent, without its thought, which is still to be generated."""
        number, self.children[parent.path] = self.children[parent.path], self.children[parent.path] + 1
        self.states.append(State((*parent.path, number), parent.thoughts))
        return self.states[-1]

    def _think(self, child: State, think: Think | None = None) -> Asking[None]:
        """Generate a state's thought, or set its `error` if a call fails.

        Args:
            think: generates the thought; None: the task's `think`.
        """
        try:
            thought = yield from (think or self.task.think)(self.problem, child.thoughts)
            child.thoughts = (*child.thoughts, thought)
        except CallFailed as failed:
            child.error = str(failed)

    def _think_and_judge(self, child: State) -> Asking[None]:
        """Generate a state's thought and ask for its score."""
        yield from self._think(child)
        if child.error is not None:
            return
        try:
            text = yield replace(self.task.judge(self.problem, child.thoughts), evaluates=True)
        except CallFailed as failed:
            child.error = str(failed)
            return
        score, (low, high) = self.task.score(text), self.task.scores
        child.without_score = int(score is None)
        child.score = low if score is None else score
        child.worth = (child.score - low) / (high - low)

    def _vote(self, states: Sequence[State]) -> Rounds[None]:
        """Score states by n votes; votes for none of them count as `without_score` of the first state."""
        if not states:
            return
        shared = _common(state.path[:-1] for state in states)
        choices = [
            f"Choice {i}:\n{self._text(one.thoughts[len(shared) :])}" for i, one in enumerate(states, 1)
        ]
        problem = f"{self.problem.text}\n\n{self._text(states[0].thoughts[: len(shared)])}".strip()
        prompt = VOTE.format(problem=problem, choices="\n\n".join(choices))
        ask = Ask(prompt, VOTE_TOKENS, (), CHOICE, evaluates=True)
        lines = [Line(shared, _single(ask)) for _ in range(self.n)]
        yield lines
        failed = [line.result for line in lines if isinstance(line.result, CallFailed)]
        votes = Counter(_choice(line.result) for line in lines if not isinstance(line.result, CallFailed))
        for i, state in enumerate(states, 1):
            state.score, state.worth = float(votes[i]), votes[i] / self.n
            if len(failed) == len(lines):
                state.error = str(failed[0])
        valid = sum(votes[i] for i in range(1, len(states) + 1))
        states[0].without_score = sum(votes.values()) - valid

    def _text(self, thoughts: Sequence[Thought]) -> str:
        return "\n".join(map(self.task.render, thoughts))


def _single(ask: Ask) -> Asking[str]:
    """Ask one prompt, and return its answer."""
    return (yield ask)


def _choice(text: str) -> int | None:
    """Return the number of the choice that a vote begins with."""
    found = _CHOICE.search(CHOICE + text)
    return int(found[1]) if found else None


def _common(paths: Iterable[NodePath]) -> NodePath:
    """Return the longest common prefix of paths."""
    first, *others = paths
    for n in range(len(first), 0, -1):
        if all(other[:n] == first[:n] for other in others):
            return first[:n]
    return ()
