"""The methods that SEED is compared with, and trees of thoughts grown by each in turn."""

import itertools
import json
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from drafttrain.inference.params import SamplingParams
from drafttrain.inference.proposer import NoProposer, Proposer, TreeProposer
from drafttrain.inference.stats import DecodeStats
from drafttrain.kernels.machine import dtype_name
from drafttrain.reasoning.branches import Pace
from drafttrain.reasoning.config import SchedulerConfig, SearchConfig
from drafttrain.reasoning.interface import Answer, Call, Then, in_rounds
from drafttrain.reasoning.reason import reason
from drafttrain.reasoning.scheduler import ScheduledDecoder
from drafttrain.reasoning.tasks import TASKS
from drafttrain.reasoning.tasks.task import Problem
from drafttrain.reasoning.timeline import TARGET, Timeline
from drafttrain.reasoning.trace import Trace
from drafttrain.trees.parse import parse_policy
from drafttrain.utils.errors import UserError
from drafttrain.utils.provenance import git_commit
from studies.resuming import whole_lines
from studies.seed.pairs import Pair

TASK_FILES = {
    "writing": "data/eval/creative_writing.jsonl.gz",
    "gsm8k": "data/eval/gsm8k_test.jsonl.gz",
    "blocksworld": "data/eval/blocksworld_step_6.jsonl.gz",
}
TUNING_FILES = {"gsm8k": "data/tuning_gsm8k.jsonl"}
SERIAL_AR, BATCHED_AR = "serial AR", "batched AR"
GENERATOR, EVALUATOR = "generator", "evaluator"
SEQUENCES = 3  # thoughts of a state
WARM_UP = 24  # tokens; fewer get no drafts
# 1: a round of calls after the other; 2: calls follow from answers; 3: mixed batches; 4: with overlap, drafts
# are accepted while the target runs the next ones
SCHEDULING = 4


@dataclass(frozen=True)
class Method:
    """A way to decode.

    Attributes:
        tree: growth policy of the drafts; None: no drafts.
        rounds: calls that follow from answers wait until all calls that are decoded have ended.
    """

    name: str
    tree: str | None
    scheduler: SchedulerConfig
    prefixes: int = 8192
    rounds: bool = False

    def decoder(self, pair: Pair, pace: Pace | None = None) -> ScheduledDecoder:
        """Return a decoder of its own for a pair."""
        proposer: Proposer = NoProposer()
        if self.tree is not None:
            proposer = TreeProposer(pair.drafter, parse_policy(self.tree))
        return ScheduledDecoder(pair.target, proposer, self.scheduler, self.prefixes, pace or Pace())


def serial(name: str, tree: str | None, short: int = SchedulerConfig.short) -> Method:
    """Return the method of one sequence after the other, on all threads (Figure 1a, b)."""
    return Method(name, tree, SchedulerConfig("one", "each", sequences=1, overlap=False, short=short))


def lockstep(name: str, tree: str | None, short: int = SchedulerConfig.short) -> Method:
    """Return the method of three sequences in a batch: all draft, all are verified, and the next calls wait
    for the slowest."""
    scheduler = SchedulerConfig("batched", "joined", SEQUENCES, overlap=False, short=short)
    return Method(name, tree, scheduler, rounds=True)


def scheduled(
    name: str,
    tree: str | None,
    verifier: str,
    overlap: bool = False,
    sequences: int = SEQUENCES,
    threads: list[int] | None = None,
    short: int = SchedulerConfig.short,
    chunk: int | None = None,
) -> Method:
    """Return the method of three sequences at a time, drafted for together (Figure 1c)."""
    scheduler = SchedulerConfig(verifier, "joined", sequences, overlap, threads, short=short, chunk=chunk)
    return Method(name, tree, scheduler)


def drawn(*k_config: int, threshold: float = 0.0) -> str:
    """Return the name of SEED's trees; with a threshold, ours."""
    name = "drawn:k_config=" + "-".join(map(str, k_config))
    return f"{name},threshold={threshold}" if threshold else name


@dataclass
class Part:
    """Time and tokens of the calls of the thought generator, or of the state evaluator, in a tree.

    Attributes:
        seconds: with prompts; a forward's are divided by tokens among its prompts and all of its drafts, and
            equally among its drafts.
        prompt_seconds: of them, in encoding prompts.
        calls, prompt_tokens: made, and of their prompts.
        tokens: emitted.
        steps: verifications, counted once for each sequence.
        granted, offered: draft tokens accepted, and judged.
    """

    seconds: float = 0.0
    prompt_seconds: float = 0.0
    calls: int = 0
    prompt_tokens: int = 0
    tokens: int = 0
    steps: int = 0
    granted: int = 0
    offered: int = 0

    @property
    def accept_len(self) -> float:
        """Return tokens per verification, without those that come from prompts."""
        return (self.tokens - self.calls) / max(self.steps, 1)

    def __add__(self, other: "Part") -> "Part":
        return Part(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass
class Grown:
    """A tree of thoughts that a method has grown.

    Attributes:
        seconds: of the whole tree, prompts included.
        tokens: emitted.
        accept_len: tokens per verification.
        busy: share of time that the target worked, from the first verdict on and while two or more sequences
            lived; None: there was no such time.
        scheduling: version of what decodes the calls of a tree; trees of different ones are not compared.
        granted, offered: draft tokens accepted, and judged (their parent was accepted).
        parts: by component, GENERATOR (with the closing generation) and EVALUATOR.
        drafter: its folder or file.
        dtype: of the target.
        tree: growth policy of the drafts; None: no drafts.
        target: its fingerprint. "" in these four: not recorded yet.
        commit: of the source; None: not recorded, or there is none.
        overdue: seconds by which the computation of paced work took longer than declared; None: not paced, or
            not recorded.
    """

    task: str
    problem: str
    method: str
    repeat: int
    seconds: float
    tokens: int
    prompt_tokens: int
    shared_tokens: int
    accept_len: float
    granted: int
    offered: int
    success: bool | None
    error: str | None
    busy: float | None = None
    parts: dict[str, Part] = field(default_factory=dict)
    scheduling: int = SCHEDULING
    drafter: str = ""
    dtype: str = ""
    tree: str | None = ""
    target: str = ""
    commit: str | None = None
    overdue: float | None = None

    @classmethod
    def read(cls, line: str) -> "Grown":
        """Return the tree of a line of JSON, as `collect` writes it."""
        values = {"scheduling": 1} | json.loads(line)
        parts = {name: Part(**part) for name, part in values.pop("parts", {}).items()}
        return cls(**values, parts=parts)


def grow(
    method: Method, decoder: ScheduledDecoder, task: str, problem: Problem, repeat: int, seed: int
) -> Grown:
    """Grow one tree with a fresh store of prefixes, and time it.

    Args:
        decoder: of the method.
    """
    decoder = ScheduledDecoder(
        decoder.target, decoder.proposer, decoder.config, decoder.prefixes, decoder.pace
    )
    parts = {GENERATOR: Part(), EVALUATOR: Part()}
    evaluates: list[bool] = []  # by number of the call

    def generate(calls: Sequence[Call], then: Then) -> None:
        def noted(calls: Sequence[Call]) -> Sequence[Call]:
            evaluates.extend(call.evaluates for call in calls)
            return calls

        def count(number: int, answer: Answer) -> Sequence[Call]:
            parts[EVALUATOR if evaluates[number] else GENERATOR] += part(answer.stats)
            return noted(then(number, answer))

        answer = in_rounds(decoder.answer) if method.rounds else decoder.answer
        answer(noted(calls), count)

    before = getattr(decoder.pace, "overdue", None)  # of paced devices
    started = time.perf_counter()
    trace: Trace = reason(task, problem, generate, SearchConfig(seed=seed))
    seconds, total = time.perf_counter() - started, sum(parts.values(), Part())
    return Grown(
        task,
        problem.id,
        method.name,
        repeat,
        seconds,
        total.tokens,
        total.prompt_tokens,
        decoder.store.shared,
        total.accept_len,
        total.granted,
        total.offered,
        None if trace.result is None else bool(trace.result.get("success")),
        trace.error,
        busy(decoder.timeline),
        parts,
        SCHEDULING,
        dtype=dtype_name(decoder.target.dtype),
        tree=method.tree,
        target=decoder.target.fingerprint,
        overdue=None if before is None else decoder.pace.overdue - before,
    )


def token_count(trace: Trace) -> int:
    """Return the tokens of all calls of a tree."""
    return sum(len(call["token_ids"]) for entry in trace.rounds for call in entry["calls"])


def part(stats: DecodeStats) -> Part:
    """Return what a call took."""
    return Part(
        stats.seconds,
        stats.prefill_seconds,
        stats.prompts,
        stats.prompt_tokens,
        stats.new_tokens,
        stats.steps,
        sum(stats.granted),
        sum(stats.offered),
    )


def busy(timeline: Timeline) -> float | None:
    """Return the share of time that the target works, from the first verdict on and while two or more
    sequences, whose prompts are encoded, live; None: there is no such time."""
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    for span in timeline.spans:
        is_encoding = (span.who, span.what) == (TARGET, "prefill")
        for number in span.sequences:
            if is_encoding:  # several times if it is long
                begins[number] = span.end
            begins.setdefault(number, span.begin)
            ends[number] = span.end
    changes = sorted([(at, 1) for at in begins.values()] + [(at, -1) for at in ends.values()])
    first = min((span.end for span in timeline.spans if span.what == "verify"), default=math.inf)
    live, worked, shared = 0, 0.0, 0.0
    for (at, change), (end, _) in itertools.pairwise(changes):
        live += change
        begin = max(at, first)
        if live > 1 and begin < end:
            worked += timeline.busy(begin=begin, end=end) * (end - begin)
            shared += end - begin
    return worked / shared if shared else None


def interleave(
    pair: Pair,
    methods: Sequence[Method],
    task: str,
    limit: int,
    repeat: int,
    note: Callable[[Grown], None],
    pace: Callable[[], Pace] = Pace,
    done: frozenset[tuple[str, str, str, int]] = frozenset(),
    files: Mapping[str, str] = TASK_FILES,
) -> None:
    """Grow the trees of evenly spaced problems by every method in turn. With each tree another method begins,
    so that none is always first, or always follows the same part of a machine's drift.

    Args:
        limit: problems of the task.
        repeat: number of the repetition; it seeds the trees.
        note: called with each tree.
        done: (task, problem, method, repeat) of trees that an interrupted run has grown.
        files: of problems, by task.
    """
    decoders = {method.name: method.decoder(pair, pace()) for method in methods}
    problems, order = problems_of(task, limit, files), deque(methods)
    order.rotate(-repeat * len(problems))
    is_warm = False  # the first forwards of a process are slow
    for problem in problems:
        for method in order:
            if (task, problem.id, method.name, repeat) not in done:
                for own in () if is_warm else decoders.values():  # without its pace, which is counted
                    short = ScheduledDecoder(own.target, own.proposer, own.config, own.prefixes)
                    short.answer([Call("Hello", WARM_UP, SamplingParams())])
                is_warm = True
                tree = grow(method, decoders[method.name], task, problem, repeat, seed=repeat)
                note(replace(tree, drafter=pair.source, commit=git_commit()))
        order.rotate(-1)


def collect(
    pair: Pair,
    methods: Callable[[str], Sequence[Method]],
    tasks: dict[str, int],
    repeats: int,
    raw: Path,
    resume: bool = False,
    pace: Callable[[], Pace] = Pace,
    files: Mapping[str, str] = TASK_FILES,
) -> list[Grown]:
    """Grow the trees of all tasks; each is written to a file of JSON lines at once.

    Args:
        methods: of a task.
        tasks: problems of each task.
        resume: go on with the trees that are in the file.
        files: of problems, by task.

    Returns:
        trees of these tasks, problems, methods and repeats; the file may have others.
    """
    found = [Grown.read(line) for line in whole_lines(raw)] if resume else []
    if any(one.scheduling != SCHEDULING for one in found):
        raise UserError(
            f"{raw}: must hold trees of this version's scheduling, got earlier ones; leave out --resume"
        )
    check_same(raw, found, pair, [(task, method) for task in tasks for method in methods(task)])
    done = frozenset((one.task, one.problem, one.method, one.repeat) for one in found)
    with open(raw, "a" if resume else "w", encoding="utf-8") as file:

        def note(one: Grown) -> None:
            found.append(one)
            file.write(json.dumps(asdict(one)) + "\n")
            file.flush()

        for repeat in range(repeats):
            for task, limit in tasks.items():
                interleave(pair, methods(task), task, limit, repeat, note, pace, done, files)
    asked = {
        (task, problem.id, method.name)
        for task, limit in tasks.items()
        for problem in problems_of(task, limit, files)
        for method in methods(task)
    }
    return [one for one in found if (one.task, one.problem, one.method) in asked and one.repeat < repeats]


def check_same(raw: Path, found: Sequence[Any], pair: Pair, methods: Sequence[tuple[str, Method]]) -> None:
    """Require that the trees of a file were grown as those that are to be added.

    Args:
        found: with `task`, `method`, `drafter`, `dtype`, `tree` and `target`.
        methods: to be added, with their tasks; the file may have others.

    Raises:
        UserError: one has another drafter, target, dtype or tree of drafts.
    """
    trees = {(task, method.name): method.tree for task, method in methods}
    same = {"drafter": pair.source, "dtype": dtype_name(pair.target.dtype), "target": pair.target.fingerprint}
    for one in found:
        for key, value in (same | {"tree": trees.get((one.task, one.method), one.tree)}).items():
            if (before := getattr(one, key)) != value:
                got = "one that was not recorded" if before == "" else before
                words = f"must hold trees of {one.method} with {key} {value}, got {got}"
                raise UserError(f"{raw}: {words}; leave out --resume")


def problems_of(task: str, limit: int, files: Mapping[str, str] = TASK_FILES) -> list[Problem]:
    """Return evenly spaced problems of a task."""
    return TASKS[task]().read(files[task], limit)
