"""Grow trees of thoughts with any function that answers calls, and record each tree in a trace that resumes.

The unit of resuming is a round of calls: a trace is written after each, whole or not at all, and a search
that starts again reads the answers of the recorded rounds from it.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drafttrain.inference.params import SamplingParams
from drafttrain.reasoning.config import ReasonConfig, SearchConfig
from drafttrain.reasoning.interface import Answer, Generate
from drafttrain.reasoning.rounds import Caller, Numbered, Round
from drafttrain.reasoning.search import parse_search
from drafttrain.reasoning.tasks import TASKS
from drafttrain.reasoning.tasks.task import Problem, Task
from drafttrain.reasoning.trace import Trace, answers_of, check_asked, record
from drafttrain.reasoning.tree import State, ThoughtTree

MODELS = "target", "drafter", "dtype", "tree"  # of a recipe, on which a text depends


class Growth:
    """A tree that is growing: the calls that it waits for, and what is known of it so far.

    Attributes:
        waiting: the calls of its next round; empty once it is finished.
        trace: its rounds so far, and the whole tree at the end.
    """

    def __init__(self, task: Task, problem: Problem, config: SearchConfig, file: Path | None) -> None:
        """Start or resume a tree.

        Args:
            file: the trace; one that is there is continued.

        Raises:
            UserError: the file is damaged, or its tree has other settings.
        """
        self._file, self._task, self._problem = file, task, problem
        sampling = SamplingParams(**asdict(config.sampling))
        steps = config.steps or task.steps
        caller = Caller(sampling, config.max_new_tokens, config.seed)
        self._tree = ThoughtTree(task, problem, caller, steps, config.thoughts, config.evaluator)
        names = [*SearchConfig.__dataclass_fields__, *MODELS]
        settings = {name: value for name, value in asdict(config).items() if name in names} | {"steps": steps}
        self.trace = Trace(task.name, {"id": problem.id, "text": problem.text}, settings)
        self._rounds = self._grow(parse_search(config.search).run(self._tree, config.breadth))
        self.waiting: list[Numbered] = next(self._rounds)
        if file is not None and file.exists():
            recorded = Trace.load(file)
            recorded.check_same(self.trace, file)
            for entry in recorded.rounds:
                check_asked(entry, self.waiting, file)
                self._send(answers_of(entry), entry)

    def receive(self, answers: Sequence[Answer], seconds: float) -> None:
        """Take the answers of the waiting calls, and write the trace.

        Args:
            seconds: that the round took.
        """
        self._send(answers, record(self.waiting, answers, seconds))
        if self._file is not None:
            self.trace.save(self._file)

    def _send(self, answers: Sequence[Answer], entry: dict[str, Any]) -> None:
        self.trace.rounds.append(entry)
        try:
            self.waiting = self._rounds.send(answers)
        except StopIteration:
            self.waiting = []

    def _grow(self, search: Round[State | None]) -> Round[None]:
        """Run the search, close the best leaf and check the result."""
        leaf, trace = (yield from search), self.trace
        trace.leaf = None if leaf is None else list(leaf.path)
        closing = None if leaf is None else (yield from self._tree.close(leaf))
        trace.states = [asdict(state) for state in self._tree.states]
        trace.without_score = sum(state.without_score for state in self._tree.states)
        if closing is None:
            trace.error = next(state.error for state in reversed(self._tree.states) if state.error)
        elif closing.error is not None:
            trace.error = closing.error
        else:
            trace.closing = closing.thoughts[-1]
            trace.result = self._task.check(self._problem, leaf.thoughts, trace.closing)
        trace.finished = True


def reason(
    task: str | Task,
    problem: Problem,
    generate: Generate,
    config: SearchConfig | None = None,
    out: str | Path | None = None,
) -> Trace:
    """Grow the tree of one problem (Algorithm 1).

    Args:
        task: or its name.
        generate: answers the calls of each round.
        config: None: the paper's search, 3 thoughts, breadth 1, temperature 1.
        out: file of the trace; a tree that was ended continues there. None: nothing is written.

    Raises:
        UserError: settings out of range, a damaged trace or one of another tree.
    """
    task = TASKS[task]() if isinstance(task, str) else task
    config = config or SearchConfig()
    config.check()
    growth = Growth(task, problem, config, None if out is None else Path(out))
    [trace] = grow_all(iter([growth]), generate)
    return trace


def grow_all(trees: Iterable[Growth], generate: Generate, at_once: int = 1) -> Iterator[Trace]:
    """Grow trees to their ends, some of them at the same time; yield their traces as they finish.

    Args:
        trees: started when their turn comes.
        at_once: trees that grow at the same time; the calls of their rounds are answered together, and each
            of them notes the time of all.
    """
    trees, active, left = iter(trees), [], True
    while left or active:
        while left and len(active) < at_once:
            tree = next(trees, None)
            left = tree is not None
            active += [tree] if left else []
        calls = [numbered.call for tree in active for numbered in tree.waiting]
        if calls:
            begun = time.perf_counter()
            answers = list(generate(calls))
            seconds = time.perf_counter() - begun
            for tree in (tree for tree in active if tree.waiting):
                n = len(tree.waiting)
                tree.receive(answers[:n], seconds)
                del answers[:n]
        yield from (tree.trace for tree in active if not tree.waiting)
        active = [tree for tree in active if tree.waiting]


def reason_from(config: ReasonConfig, generate: Generate) -> Iterator[Trace]:
    """Grow a tree for each problem of a recipe; traces are files in `config.out`, named by the problems' ids.

    Raises:
        UserError: settings out of range, a file of another task, damaged traces or traces of other settings.
    """
    config.check()
    task, out = TASKS[config.task.name](), Path(config.out)
    problems = task.read(config.task.path, config.task.limit)
    trees = (Growth(task, problem, config, trace_file(out, problem.id)) for problem in problems)
    return grow_all(trees, generate, config.task.at_once)


def trace_file(folder: Path, problem_id: str) -> Path:
    """Return the file of a problem's trace; "/" in an id becomes "_"."""
    return folder / f"{problem_id.replace('/', '_')}.json"
