"""Grow trees of thoughts with any function that answers calls, and record each tree in a trace that resumes.

The unit of resuming is a call: a trace is written atomically every second, at the end of each round and when
a run is interrupted, and a restarted search takes the recorded answers from it.
"""

import itertools
import json
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drafttrain.inference.params import SamplingParams
from drafttrain.reasoning.config import ReasonConfig, SearchConfig
from drafttrain.reasoning.interface import Answer, Call, Generate, in_rounds
from drafttrain.reasoning.lines import Caller, Line, NodePath, Numbered, Rounds
from drafttrain.reasoning.search import parse_search
from drafttrain.reasoning.tasks import TASKS
from drafttrain.reasoning.tasks.task import Ask, Problem, Task
from drafttrain.reasoning.trace import REMEDY, Trace, answer_of, is_record_of, record
from drafttrain.reasoning.tree import State, ThoughtTree
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint
from drafttrain.utils.provenance import HASHES, Hashes, content_hash

SUMMARY = "summary.json"  # sums over all trees, in the folder of the traces
PAUSE = 1.0  # minimum seconds between two writes of a trace within a round
MODELS = "target", "drafter", "dtype", "tree"  # keys of a recipe that affect the generated texts


class Growth:
    """A tree of thoughts that is growing: its pending calls and its trace so far.

    Attributes:
        trace: its rounds so far, and the whole tree at the end.
    """

    def __init__(
        self,
        task: Task,
        problem: Problem,
        config: SearchConfig,
        file: Path | None,
        weights: str | None = None,
    ) -> None:
        """Start or resume a tree.

        Args:
            file: of the trace; an existing trace is resumed. None: nothing is written.
            weights: hash of the target's. None: unknown.

        Raises:
            UserError: the file is damaged, or its tree has other settings.
        """
        self._file, self._task, self._problem = file, task, problem
        sampling = SamplingParams(**asdict(config.sampling))
        steps = config.steps or task.steps
        self._caller = Caller(sampling, config.max_new_tokens, config.seed)
        self._tree = ThoughtTree(task, problem, steps, config.thoughts, config.evaluator)
        names = [*SearchConfig.__dataclass_fields__, *MODELS]
        settings = {name: value for name, value in asdict(config).items() if name in names} | {"steps": steps}
        tree = settings.get("tree") or "drawn"  # null: the bundle's policy, which may be
        if settings.get("drafter") and tree.startswith("drawn"):  # draws depend on which answers get drafts
            settings["short"] = config.scheduler.short
        settings |= {"weights": weights} if weights else {}
        self.trace = Trace(task.name, {"id": problem.id, "text": problem.text}, settings)
        self._rounds = self._grow(parse_search(config.search).run(self._tree, config.breadth))
        self._waiting: dict[tuple[NodePath, int], tuple[int, Numbered]] = {}  # with the number of its line
        self._saved = 0.0
        self._begin_round()
        if file is not None and file.exists():
            self._replay(Trace.load(file), file)

    @property
    def waiting(self) -> list[Numbered]:
        """Return the pending calls; none once the tree is finished."""
        return [numbered for _, numbered in self._waiting.values()]

    def receive(self, numbered: Numbered, answer: Answer) -> list[Numbered]:
        """Take the answer to a pending call, and return the calls that follow from it. The trace is written
        at the end of a round, and if the last write was more than `PAUSE` seconds ago."""
        entry = self._entry
        more = self._take(numbered, answer)
        if entry is not self._entry or not self._waiting or time.monotonic() - self._saved > PAUSE:
            self.save()
        return more

    def save(self) -> None:
        """Write the trace to its file, if it has an answer."""
        if self._file is not None and self.trace.rounds:
            self.trace.save(self._file)
        self._saved = time.monotonic()

    def _take(self, numbered: Numbered, answer: Answer) -> list[Numbered]:
        line_number, _ = self._waiting.pop((numbered.path, numbered.number))
        line, entry = self._lines[line_number], self._entry
        if not entry["calls"]:
            self.trace.rounds.append(entry)
        self._calls[line_number].append(record(numbered, answer))
        entry["calls"] = [call for calls in self._calls for call in calls]
        entry["seconds"] = self._spent + time.perf_counter() - self._begun
        ask = line.go_on(answer.text) if answer.error is None else line.fail(answer.error)
        more = self._ask(line_number, ask)
        return more if self._waiting else self._begin_round()

    def _ask(self, line_number: int, ask: Ask | None) -> list[Numbered]:
        """Turn a line's next prompt, if there is one, into a pending call and return it."""
        if ask is None:
            return []
        numbered = self._caller.call(self._lines[line_number].path, ask)
        self._waiting[numbered.path, numbered.number] = line_number, numbered
        return [numbered]

    def _begin_round(self) -> list[Numbered]:
        """Begin the search's next round that makes calls; return the first call of each of its lines."""
        for lines in self._rounds:
            self._lines: Sequence[Line] = lines
            self._calls: list[list[dict[str, Any]]] = [[] for _ in lines]
            self._entry: dict[str, Any] = {"seconds": 0.0, "calls": []}
            self._spent, self._begun = 0.0, time.perf_counter()
            for line_number, line in enumerate(lines):
                self._ask(line_number, line.begin())
            if self._waiting:
                break
        return self.waiting

    def _replay(self, recorded: Trace, file: Path) -> None:
        """Resume the tree with the recorded answers of its trace.

        Raises:
            UserError: the trace is of another tree.
        """
        recorded.check_same(self.trace, file)
        calls = [call for entry in recorded.rounds for call in entry["calls"]]
        left = {(tuple(call["path"]), call["number"]): call for call in calls}
        asked, is_same = deque(self.waiting), len(left) == len(calls)
        while asked and is_same:
            numbered = asked.popleft()
            call = left.pop((numbered.path, numbered.number), None)
            if call is not None:
                is_same = is_record_of(call, numbered)
                asked += self._take(numbered, answer_of(call)) if is_same else []
        if left or not is_same:
            raise UserError(f"{file}: must be a trace of the same prompts and seeds, got others; {REMEDY}")
        for entry, before in zip(self.trace.rounds, recorded.rounds):
            entry["seconds"] = before["seconds"]
        self._spent, self._begun = self._entry["seconds"], time.perf_counter()
        # the run ended between its last answer and the end, or the problem's reference was corrected since
        checked = json.dumps(self.trace.result) == json.dumps(recorded.result)
        if self.trace.finished and not (recorded.finished and checked):
            self.save()

    def _grow(self, search: Rounds[State | None]) -> Rounds[None]:
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
        task: a `Task` or the name of one.
        generate: a `ScheduledDecoder`, or a function that answers calls and those that follow from them;
            `in_rounds` makes one from a function that answers a list of calls.
        config: None: the paper's search, 3 thoughts, breadth 1, temperature 1.
        out: file of the trace; an interrupted tree resumes from it. None: nothing is written.

    Raises:
        UserError: no task of that name, settings out of range, a damaged trace or one of another tree.
    """
    if isinstance(task, str):
        if task not in TASKS:
            raise UserError(f"task: must be one of {', '.join(TASKS)}, or a Task, got {task!r}")
        task = TASKS[task]()
    config = config or SearchConfig()
    config.check()
    growth = Growth(task, problem, config, None if out is None else Path(out))
    grow_all([growth], generate, lambda trace: None)
    return growth.trace


def grow_all(
    trees: Iterable[Growth], generate: Generate, note: Callable[[Trace], None], at_once: int = 1
) -> None:
    """Grow trees until each of them is finished, several at the same time.

    Args:
        trees: started when their turn comes.
        generate: called once; answers the calls of all trees.
        note: called with the trace of each tree that is finished.
        at_once: trees that grow at the same time; the seconds of a round include waiting for calls of the
            other trees.
    """
    trees = iter(trees)
    numbers = itertools.count()
    asked: dict[int, tuple[Growth, Numbered]] = {}  # pending calls by number

    def ask(tree: Growth, calls: Sequence[Numbered]) -> list[Call]:
        asked.update((next(numbers), (tree, numbered)) for numbered in calls)
        return [numbered.call for numbered in calls]

    def start() -> list[Call]:
        """Start the next tree that is not finished."""
        for tree in trees:
            if tree.waiting:
                return ask(tree, tree.waiting)
            note(tree.trace)
        return []

    def then(number: int, answer: Answer) -> list[Call]:
        tree, numbered = asked[number]
        more = tree.receive(numbered, answer)
        del asked[number]  # only now: a tree that fails with its last answer is saved too
        if tree.waiting:
            return ask(tree, more)
        note(tree.trace)
        return start()

    first = [call for _ in range(at_once) for call in start()]
    try:
        if first:
            generate(first, then)
    finally:  # an interrupted run loses no answer
        for tree in {id(tree): tree for tree, _ in asked.values()}.values():
            tree.save()


def reason_from(
    config: ReasonConfig,
    begin: Callable[[int, Sequence[Trace]], Generate],
    note: Callable[[Trace], None],
) -> None:
    """Grow a tree for each problem of a recipe; traces are files in `config.out`, named by the problems' ids.

    Args:
        begin: called with the number of problems and the traces of finished trees after all existing traces
            have been read, unless all trees are finished; returns the function that answers calls.
        note: called with the trace of each tree that is finished.

    Raises:
        UserError: settings out of range, a file of another task, damaged traces or traces of other settings.
    """
    config.check()
    task, out = TASKS[config.task.name](), Path(config.out)
    problems = task.read(config.task.path, config.task.limit)
    files = [trace_file(out, problem.id) for problem in problems]
    if out / SUMMARY in files:
        raise UserError(
            f"{config.task.path}: no id may be {Path(SUMMARY).stem}, the results' name; rename it"
        )
    if twice := [file.stem for file, n in Counter(files).items() if n > 1]:
        raise UserError(
            f"{config.task.path}: ids must differ, also as names of files, got {twice[0]} twice; rename one"
        )
    weights = _weights(config.target, out)
    finished = []
    for problem, file in zip(problems, files):  # before a model is loaded
        if file.exists() and not (growth := Growth(task, problem, config, file, weights)).waiting:
            finished.append(growth.trace)
    nothing = in_rounds(list)  # finished trees have no calls
    generate = nothing if len(finished) == len(problems) else begin(len(problems), finished)
    trees = (Growth(task, problem, config, file, weights) for problem, file in zip(problems, files))
    grow_all(trees, generate, note, config.task.at_once)


def _weights(target: str, out: Path) -> str | None:
    """Return a hash of a target's config and weights in a folder or file, which may be replaced between two
    runs; None for a Hub id or a known name."""
    place, hashes = Path(os.path.expanduser(target)), Hashes(out / HASHES)
    files = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
    if not files:
        return None
    files += [place / "config.json"] if place.is_dir() else []
    found = fingerprint([content_hash(file, hashes) for file in files])
    if out.is_dir():
        hashes.save()
    return found


def trace_file(folder: Path, problem_id: str) -> Path:
    """Return the file of a problem's trace; "/" in an id becomes "_"."""
    return folder / f"{problem_id.replace('/', '_')}.json"
