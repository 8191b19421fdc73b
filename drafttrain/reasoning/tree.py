"""The tree of thoughts of one problem: states, the thought generator and the state evaluator (Figure 2)."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from drafttrain.reasoning.rounds import Caller, Failed, Path, Round
from drafttrain.reasoning.tasks.task import Ask, Asking, Problem, Task, Thought

VOTE = (
    "{problem}\n\nSeveral continuations have been suggested:\n\n{choices}\n\nWhich one is best? Begin with "
    'the line "Best choice: N", where N is its number. Then compare them in one or two sentences.'
)
CHOICE = "Best choice: "
VOTE_TOKENS = 96
_CHOICE = re.compile(r"choice\b\D{0,20}(\d+)", re.IGNORECASE)


@dataclass
class State:
    """A node: the problem with the thoughts on the path from the root.

    Attributes:
        path: numbers of the children from the root on.
        thoughts: one for each level.
        score: of the newest thought, by the task's scale; votes under `vote`. None: not evaluated.
        worth: the score as a share of its range, 0 to 1, which searches compare.
        without_score: answers of the evaluator that had no score and count as the lowest.
        error: why it has no thought or no score; the branch ends here.
    """

    path: Path = ()
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
    """Expands and evaluates states for a search.

    Attributes:
        steps: levels of thoughts at most.
        n: thoughts generated from a state.
        evaluator: each state's own score, or votes for the best of those that are evaluated together.
        states: all of them, in the order in which they were made; the root is first.
        children: how many each node has had.
    """

    task: Task
    problem: Problem
    caller: Caller
    steps: int
    n: int
    evaluator: Literal["value", "vote"] = "value"
    states: list[State] = field(default_factory=lambda: [State()])
    children: Counter[Path] = field(default_factory=Counter)

    @property
    def root(self) -> State:
        """Return the state without thoughts."""
        return self.states[0]

    def expand(self, states: Sequence[State]) -> Round[list[State]]:
        """Generate n thoughts from each of these states; return the new ones, without those that failed."""
        return self._generate([state for state in states for _ in range(self.n)])

    def evaluate(self, states: Sequence[State]) -> Round[list[State]]:
        """Score states; return those whose calls have not failed."""
        score = self._vote if self.evaluator == "vote" else self._value
        yield from score(states)
        return [state for state in states if state.error is None]

    def close(self, leaf: State) -> Round[State]:
        """Generate once after the best leaf, and return the state that ends the tree."""
        path = self._next_path(leaf)
        [closing] = yield from self.caller.ask([(path, self.task.close(self.problem, leaf.thoughts))])
        self.states.append(_child(path, leaf, closing))
        return self.states[-1]

    def _generate(self, parents: Sequence[State]) -> Round[list[State]]:
        paths = [self._next_path(parent) for parent in parents]
        askings = [self.task.think(self.problem, parent.thoughts) for parent in parents]
        thoughts = yield from self.caller.ask(list(zip(paths, askings)))
        made = [_child(*each) for each in zip(paths, parents, thoughts)]
        self.states += made
        return [state for state in made if state.error is None]

    def _next_path(self, parent: State) -> Path:
        number, self.children[parent.path] = self.children[parent.path], self.children[parent.path] + 1
        return (*parent.path, number)

    def _value(self, states: Sequence[State]) -> Round[None]:
        """Ask for each state's score by itself."""
        asks = [_single(self.task.judge(self.problem, state.thoughts)) for state in states]
        texts = yield from self.caller.ask([(state.path, ask) for state, ask in zip(states, asks)], True)
        low, high = self.task.scores
        for state, text in zip(states, texts):
            if isinstance(text, Failed):
                state.error = text.reason
                continue
            score = self.task.score(text)
            state.without_score = int(score is None)
            state.score = low if score is None else score
            state.worth = (state.score - low) / (high - low)

    def _vote(self, states: Sequence[State]) -> Round[None]:
        """Let n votes choose among states; votes for none of them are counted at the first one."""
        if not states:
            return
        shared = _common(state.path[:-1] for state in states)
        choices = [
            f"Choice {i}:\n{self._text(one.thoughts[len(shared) :])}" for i, one in enumerate(states, 1)
        ]
        problem = f"{self.problem.text}\n\n{self._text(states[0].thoughts[: len(shared)])}".strip()
        ask = Ask(VOTE.format(problem=problem, choices="\n\n".join(choices)), VOTE_TOKENS, (), CHOICE)
        texts = yield from self.caller.ask([(shared, _single(ask)) for _ in range(self.n)], True)
        failed = [text for text in texts if isinstance(text, Failed)]
        votes = Counter(_choice(text) for text in texts if not isinstance(text, Failed))
        for i, state in enumerate(states, 1):
            state.score, state.worth = float(votes[i]), votes[i] / self.n
            if len(failed) == len(texts):
                state.error = failed[0].reason
        valid = sum(votes[i] for i in range(1, len(states) + 1))
        states[0].without_score = sum(votes.values()) - valid

    def _text(self, thoughts: Sequence[Thought]) -> str:
        return "\n".join(map(self.task.render, thoughts))


def _single(ask: Ask) -> Asking[str]:
    """Ask one prompt, and return its answer."""
    return (yield ask)


def _child(path: Path, parent: State, thought: Thought | Failed) -> State:
    if isinstance(thought, Failed):
        return State(path, parent.thoughts, error=thought.reason)
    return State(path, (*parent.thoughts, thought))


def _choice(text: str) -> int | None:
    """Return the number of the choice that a vote begins with."""
    found = _CHOICE.search(CHOICE + text)
    return int(found[1]) if found else None


def _common(paths) -> Path:
    """Return the longest path that all of these begin with."""
    first, *others = paths
    for n in range(len(first), 0, -1):
        if all(other[:n] == first[:n] for other in others):
            return first[:n]
    return ()
