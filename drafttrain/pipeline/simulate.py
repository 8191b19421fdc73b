"""Discrete-event simulation of the seconds that a pipeline takes on described hardware (drafter, stages and
links), for one request or several.

What is computed is taken from a trace of what really happens (`replay.py`); only the time is simulated.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from drafttrain.pipeline.replay import Trace
from drafttrain.trees.costs import CostCurve
from drafttrain.utils.errors import UserError

DRAFTER, PIPELINE = "drafter", "pipeline"
Job = tuple[str, float]  # the resource that it holds, and for how many seconds
Work = tuple[float, float]  # its seconds while all other machines rest, and while all of them work


@dataclass(frozen=True)
class Link:
    """A connection between two stages.

    Attributes:
        gbit: bandwidth, 10^9 bits a second.
        seconds: latency of a message.
        bytes: of a token's states.
    """

    gbit: float
    seconds: float
    bytes: int

    def __call__(self, tokens: int) -> float:
        """Return the seconds of a message with the states of some tokens; 0 for none."""
        return self.message(self.bytes * tokens) if tokens else 0.0

    def message(self, size: int) -> float:
        """Return the seconds of a message of some bytes."""
        return self.seconds + 8 * size / (self.gbit * 1e9)


@dataclass(frozen=True)
class Machines:
    """The machines of a pipeline.

    Attributes:
        stages: seconds of each group of stages by the number of tokens, transfers within the group included.
        links: seconds of each link between neighbours by the number of tokens; one fewer than stages.
        draft: seconds of a draft step by expanded nodes, the transfer to the first stage included.
        sync: seconds of the end of a timestep, mostly the broadcast.
        broadcast: seconds of the broadcast of a token in `pp` and `stpp`.
        beside: whether the drafter is on the machine of the first stage, so that one waits for the other.
        alone: seconds of each group while all other machines rest, if machines share a memory, and `stages`
            are those while all work; by default those of `stages`.
        draft_alone: the same of a draft step; by default those of `draft`.
    """

    stages: Sequence[Callable[[int], float]]
    links: Sequence[Callable[[int], float]]
    draft: CostCurve
    sync: float = 0.0
    broadcast: float = 0.0
    beside: bool = False
    alone: Sequence[Callable[[int], float]] = ()
    draft_alone: CostCurve | None = None

    def __post_init__(self) -> None:
        if len(self.links) != len(self.stages) - 1:
            raise UserError(
                f"links: must be one fewer than the {len(self.stages)} stages, got {len(self.links)}; give "
                "one for each pair of neighbours"
            )

    def computing(self, group: int, tokens: int) -> float:
        """Return the seconds of a group for some tokens; 0 for none."""
        return self.stages[group](tokens) if tokens else 0.0

    def sending(self, group: int, tokens: int) -> float:
        """Return the seconds of what a group sends to the next one; 0 for no tokens."""
        return self.links[group](tokens) if tokens else 0.0

    def stage_work(self, group: int, tokens: int) -> list[Work]:
        """Return the work of a group for some tokens; none for none."""
        return [((self.alone or self.stages)[group](tokens), self.stages[group](tokens))] if tokens else []

    def draft_work(self, expanded: Sequence[int]) -> list[Work]:
        """Return the work of draft steps by the nodes that each expands."""
        return [((self.draft_alone or self.draft)(n), self.draft(n)) for n in expanded]


@dataclass(frozen=True)
class Event:
    """A simulated job.

    Attributes:
        request: its number.
        resource: what it held.
        start, end: in seconds.
    """

    request: int
    resource: str
    start: float
    end: float


def through(machines: Machines, tokens: int) -> Iterator[Job]:
    """Yield the jobs of a forward of some tokens through all stages."""
    for group in range(len(machines.stages)):
        yield f"stage {group}", machines.computing(group, tokens)
        if group < len(machines.links):
            yield f"link {group}", machines.sending(group, tokens)
    if machines.broadcast:
        yield "broadcast", machines.broadcast


def pp_jobs(machines: Machines, tokens: int) -> Iterator[Job]:
    """Yield the jobs of plain pipelining for an output: every token passes all stages before the next one."""
    for _ in range(tokens):
        yield from through(machines, 1)


def stpp_jobs(machines: Machines, rounds: Iterable[tuple[Sequence[int], int]]) -> Iterator[Job]:
    """Yield the jobs of a static tree (the paper's STPP).

    Args:
        rounds: of each round the nodes that each drafting step expands, and the nodes that are verified, root
            included.
    """
    for drafted, nodes in rounds:
        for expanded in drafted:
            yield DRAFTER, machines.draft(expanded)
        yield from through(machines, nodes)


def timestep_seconds(machines: Machines, drafted: Sequence[int], nodes: Sequence[int]) -> float:
    """Return the seconds of a timestep of PipeDec (§2.4): drafter and stages work side by side; when all
    stages are done they send. After a miss most stages rest, and leave a memory that all share to the others.

    Args:
        drafted: nodes that each drafting step expands.
        nodes: that each group of stages runs.
    """
    works = [machines.stage_work(group, n) for group, n in enumerate(nodes)]
    drafts = machines.draft_work(drafted)
    if machines.beside:
        computing, drafting = side_by_side([drafts + works[0], *works[1:]]), 0.0
    else:
        *computing, drafting = side_by_side([*works, drafts])
    sending = max(
        (machines.sending(group, nodes[group]) for group in range(len(machines.links))), default=0.0
    )
    return max(drafting, max(computing) + sending) + machines.sync


def side_by_side(works: Sequence[Sequence[Work]]) -> list[float]:
    """Return when each machine ends that begins its pieces of work now and does one after the other. How fast
    it is changes in proportion to the share of other machines that are at work at that moment."""
    if all(alone == together for work in works for alone, together in work):
        return [sum(alone for alone, _ in work) for work in works]
    left = [[*reversed(work)] for work in works]  # the next piece last
    ends, now = [0.0] * len(works), 0.0
    while busy := [machine for machine, pieces in enumerate(left) if pieces]:
        others = (len(busy) - 1) / max(len(works) - 1, 1)
        taken = {i: alone + (together - alone) * others for i in busy for alone, together in left[i][-1:]}
        step = min(taken.values())
        now += step
        for i in busy:
            alone, together = left[i].pop()
            if taken[i] > step:
                rest = 1 - step / taken[i]
                left[i].append((alone * rest, together * rest))
            elif not left[i]:
                ends[i] = now
    return ends


def pipedec_jobs(machines: Machines, trace: Trace) -> Iterator[Job]:
    """Yield the one job of PipeDec for an output, which occupies all stages until it ends.

    Timesteps during the prompt cost only what exceeds a group's seconds for a prompt of one token.
    """
    seconds = sum(timestep_seconds(machines, step.drafted, step.nodes) for step in trace.steps)
    for group, step in enumerate(trace.beside, 1):  # the group that the prompt is in meanwhile
        prompt = [int(i == group) for i in range(len(step.nodes))]
        both = [n or one for n, one in zip(step.nodes, prompt)]
        taken = timestep_seconds(machines, step.drafted, both) - timestep_seconds(machines, [], prompt)
        seconds += max(0.0, taken)
    yield PIPELINE, seconds


def run(requests: Sequence[Iterable[Job]], at_once: int = 1) -> list[Event]:
    """Simulate requests, `at_once` of them together; resources serve jobs first come, first served.

    A request begins when an earlier one has ended. Its jobs run one after the other.
    """
    jobs = [iter(request) for request in requests]
    free: dict[str, float] = {}
    events: list[Event] = []
    ready = [(0.0, number) for number in range(min(at_once, len(jobs)))]
    following = len(ready)
    while ready:
        now, number = heapq.heappop(ready)
        job = next(jobs[number], None)
        if job is None:
            if following < len(jobs):
                heapq.heappush(ready, (now, following))
                following += 1
            continue
        resource, seconds = job
        start = max(now, free.get(resource, 0.0))
        free[resource] = end = start + seconds
        events.append(Event(number, resource, start, end))
        heapq.heappush(ready, (end, number))
    return events


def total_seconds(events: Sequence[Event]) -> float:
    """Return when the last job ends."""
    return max((event.end for event in events), default=0.0)
