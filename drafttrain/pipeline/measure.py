"""Measurements of a pipeline on its ranks: the costs that `simulate.py` needs.

Stages are timed while all of them work, as in `pipedec`, and while the others wait, as in `pp` and `stpp`:
ranks of one machine share its memory. What a timestep takes besides computing is measured by decoding.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from drafttrain.pipeline.baselines import pp, stpp
from drafttrain.pipeline.distributed import Ranks
from drafttrain.pipeline.member import Member, Request
from drafttrain.pipeline.prediction import PredictionTree, follows_prompt
from drafttrain.pipeline.program import pipedec
from drafttrain.pipeline.simulate import Machines, timestep_seconds
from drafttrain.pipeline.stage import Flow
from drafttrain.pipeline.transport import Broadcast, Program, Receive, Send
from drafttrain.trees.costs import CostCurve
from drafttrain.utils.errors import UserError

SIZES = (1, 2, 3, 4, 6, 8, 16, 32)  # tokens
CONTEXT, ROUNDS, WARM_UP = 128, 7, 2
NO_TOKEN = -1  # no token of the drafter: advancing a tree by it is a miss, which restarts the tree
Work = tuple[
    Callable[[int], None], Callable[[int], None]
]  # untimed preparation for a size, timed work of a size


@dataclass
class PipelineCosts:
    """Measured seconds of a pipeline's parts.

    Attributes:
        sizes: numbers of tokens that are measured.
        groups: of each group of stages by tokens while all ranks work, [groups][sizes].
        alone: the same while the others wait, all in turn.
        judging: the last group with the logits of all tokens, while the others wait, [sizes].
        draft: a draft step by expanded nodes while all ranks work, [sizes].
        draft_alone: the same while the others wait.
        hop: a message between neighbours by tokens, [sizes].
        broadcast: the broadcast of a token to all ranks.
        sync: a timestep without the blocks and drafting of its slowest rank, the mean over decoded prompts.
        beside: whether the drafter is on the first stage's rank.
        waiting: a timestep without all computing (head and tree growth included) of its busiest group or
            drafter: the broadcast, the update of trees and caches, and sending.
        round: a round with a static tree without the computing of drafter and stages: messages, acceptance,
            and the drafter's update with the path.
        token: a token of plain pipelining without the computing of stages: messages, and what ranks wait for.
        decoding: by mode, computing while decoding / the same simulated with the parts' times above: that of
            timesteps in pipedec, that of stages in stpp and pp; a mode that is not there counts as 1.
    """

    sizes: list[int]
    groups: list[list[float]]
    alone: list[list[float]]
    judging: list[float]
    draft: list[float]
    draft_alone: list[float]
    hop: list[float]
    broadcast: float
    sync: float
    beside: bool
    waiting: float = 0.0
    round: float = 0.0
    token: float = 0.0
    decoding: dict[str, float] = field(default_factory=dict)

    def machines(self, mode: str) -> Machines:
        """Return the machines with which to simulate a mode."""
        factor = self.decoding.get(mode, 1.0)
        if mode == "pipedec":  # what is sent is part of the timestep's end
            links = [lambda tokens: 0.0] * (len(self.groups) - 1)
            groups, alone = (
                [self._curve(one, factor) for one in every] for every in (self.groups, self.alone)
            )
            draft, draft_alone = (self._curve(one, factor) for one in (self.draft, self.draft_alone))
            more = {"beside": self.beside, "alone": alone, "draft_alone": draft_alone}
            return Machines(groups, links, draft, self.end, **more)
        last = self.judging if mode == "stpp" else self.alone[-1]
        groups = [self._curve(one, factor) for one in (*self.alone[:-1], last)]
        links, broadcast = [self._curve(self.hop)] * (len(groups) - 1), self.broadcast
        if measured := self.round if mode == "stpp" else self.token:  # earlier versions did not measure it
            links, broadcast = [lambda tokens: 0.0] * len(links), measured
        return Machines(groups, links, self._curve(self.draft_alone), broadcast=broadcast)

    @property
    def end(self) -> float:
        """Return the seconds of a timestep that the curves of groups and drafter do not include."""
        return self.waiting or self.sync  # earlier versions measured only `sync`

    def target(self) -> CostCurve:
        """Return the seconds of the whole target by tokens: those of all groups together."""
        return self._curve([sum(one) for one in zip(*self.groups)], self.decoding.get("pipedec", 1.0))

    def drafter(self) -> CostCurve:
        """Return the seconds of a draft step by expanded nodes."""
        return self._curve(self.draft, self.decoding.get("pipedec", 1.0))

    def _curve(self, seconds: Sequence[float], factor: float = 1.0) -> CostCurve:
        rising = [max(seconds[: i + 1]) for i in range(len(seconds))]  # noise may make measured times fall
        return CostCurve(self.sizes, [factor * one for one in rising])


@torch.no_grad()
def measure(me: Member, ranks: Ranks, requests: Sequence[Request], hidden: int) -> PipelineCosts:
    """Measure the parts of a pipeline; all ranks must call it.

    Args:
        requests: prompts to decode for `sync`, `waiting`, `round`, `token` and `decoding`.
        hidden: size of the target's states.
    """
    stage, judge, draft = (
        stage_work(me, hidden),
        stage_work(me, hidden, judges=True),
        draft_work(me, hidden),
    )
    layout, n = me.layout, len(SIZES)
    together = times(ranks, stage or draft)
    drafting = times(ranks, draft or stage)  # beside a stage it takes turns with that
    alone = times(ranks, stage, in_turn=layout.stages)
    judging = times(ranks, judge if me.is_last else stage, in_turn=layout.stages)
    draft_alone = times(ranks, draft)
    hop = _hops(me, ranks, hidden)
    broadcast = _broadcast(me, ranks)
    decoded = [step for one in requests for step in _timesteps(me, ranks, one)]
    if not decoded:
        raise UserError(
            "max_new_tokens: outputs must take three timesteps or more to measure their ends, got shorter "
            "ones; raise it, or name other prompts"
        )
    sync = statistics.fmean(step.seconds - step.slowest for step in decoded)
    waiting = statistics.fmean(step.seconds - step.busiest for step in decoded)
    rounds = [passed for one in requests for passed in _rounds(me, ranks, one)]
    tokens = [passed for one in requests for passed in _tokens(me, ranks, one)]
    own = [*together, *alone, *judging, *drafting, *draft_alone, *hop]
    means = [statistics.fmean(p.rest for p in one) if one else 0.0 for one in (rounds, tokens)]
    rows = ranks.gather([*own, broadcast, sync, waiting, *means])

    def of(rank: int, part: int) -> list[float]:
        return rows[rank][part * n : (part + 1) * n]

    hop, (broadcast, sync, waiting, round_, token) = of(layout.stages[0], 5), rows[layout.drafter][-5:]
    within = max(len(members) - 1 for members in layout.groups)  # messages, which a group's curve has
    waiting = max(waiting - within * hop[0], 1e-9)  # 0 is for what was not measured
    all_within = len(layout.stages) - len(layout.groups)  # of all groups, which work one after the other
    round_, token = (max(one - all_within * hop[0], 1e-9) if one else 0.0 for one in (round_, token))

    def group(members: Sequence[int], part: int, last: int | None = None) -> list[float]:
        parts = [of(rank, part) for rank in members]
        if last is not None:
            parts[-1] = of(members[-1], last)
        return [sum(seconds) + (len(parts) - 1) * hop[i] for i, seconds in enumerate(zip(*parts))]

    costs = PipelineCosts(
        list(SIZES),
        [group(members, 0) for members in layout.groups],
        [group(members, 1) for members in layout.groups],
        group(layout.groups[-1], 1, last=2),
        of(layout.drafter, 3),
        of(layout.drafter, 4),
        hop,
        broadcast,
        sync,
        layout.drafter in layout.stages,
        waiting,
        round_,
        token,
    )
    described = replace(costs.machines("pipedec"), sync=0.0)
    simulated = sum(timestep_seconds(described, step.drafted, step.nodes) for step in decoded)
    costs.decoding["pipedec"] = sum(step.busiest + within * hop[0] for step in decoded) / simulated
    for mode, passes in (("stpp", rounds), ("pp", tokens)):
        described = costs.machines(mode)
        groups = range(len(described.stages))
        simulated = sum(described.computing(group, one.nodes) for one in passes for group in groups)
        if passes:
            costs.decoding[mode] = sum(one.stages + all_within * hop[0] for one in passes) / simulated
    return costs


def times(
    ranks: Ranks, work: Work | None, sizes: Sequence[int] = SIZES, in_turn: Sequence[int] = ()
) -> list[float]:
    """Return this rank's median seconds by size, 0 without work. All ranks start together, or those of
    `in_turn` one after the other, as in `pp`, where each evicts what the one before left in the caches."""
    taken: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(WARM_UP + ROUNDS):
        for size in sizes:
            if work is not None:
                work[0](size)
            for rank in in_turn or [ranks.rank]:
                ranks.total([0])  # waits for all
                if work is None or rank != ranks.rank:
                    continue
                started = time.perf_counter()
                work[1](size)
                if turn >= WARM_UP:
                    taken[size].append(time.perf_counter() - started)
    return [statistics.median(taken[size]) if work is not None else 0.0 for size in sizes]


def stage_work(me: Member, hidden: int, judges: bool = False, sizes: Sequence[int] = SIZES) -> Work | None:
    """Return the work of a stage: a forward over a root and its children, `size` nodes; at the last stage
    also picking a token or, if it `judges`, the logits of all nodes. None without a stage."""
    if me.stage is None:
        return None
    stage, request = me.stage, Request([], 0)
    inputs = _states(stage.part.is_first, max(CONTEXT, *sizes), hidden)
    stage.reset()
    stage.prefill(inputs[:CONTEXT])

    def run(size: int) -> None:
        started = time.perf_counter()
        out = stage.compute_tree(_star(size, None if stage.part.is_first else inputs[:size]))
        me.wait()
        me.stage_pace.wait(started, size)  # of the blocks alone, in all modes
        if me.is_last and judges:
            stage.part.logits(out.x)
            me.wait()
        elif me.is_last:
            me.pick(out.x[0], request, 0)

    return (lambda size: None), run


def draft_work(me: Member, hidden: int, sizes: Sequence[int] = SIZES) -> Work | None:
    """Return the work of a draft step over a layer of `size` nodes; None without a drafter."""
    if me.drafter is None:
        return None
    tapped = torch.zeros(CONTEXT, len(me.taps) * hidden, dtype=me.drafter.dtype, device=me.device)
    tokens = torch.arange(CONTEXT, device=me.device)[None]  # [1, n]
    state = me.drafter.new_state(1, CONTEXT + 8 * len(sizes) * (WARM_UP + ROUNDS))
    me.drafter.update(state, tokens, tapped[None], tokens.new_tensor([CONTEXT]))
    trees: list[PredictionTree] = []

    def prepare(size: int) -> None:
        if trees:
            trees.pop().advance(NO_TOKEN, tapped[:1])
        trees.append(PredictionTree(me.drafter, state, 0, size, size, me.device))
        trees[0].expand()
        trees[0].grow(1)

    def run(size: int) -> None:
        started = time.perf_counter()
        trees[0].expand()
        trees[0].grow(2)
        me.wait()
        me.draft_pace.wait(started)

    return prepare, run


def _hops(me: Member, ranks: Ranks, hidden: int) -> list[float]:
    """Return the seconds of a message from the first stage to the second, by size: half of a round trip;
    zeros at other ranks and for a single stage."""
    stages = me.layout.stages
    if len(stages) < 2 or me.rank not in stages[:2]:
        return [0.0] * len(SIZES)
    sends, other = me.rank == stages[0], stages[1] if me.rank == stages[0] else stages[0]

    def to_and_fro(size: int) -> Program:
        flow = _star(size, _states(False, size, hidden).to(me.stage.part.state_dtype))
        for is_sending in (sends, not sends):
            if is_sending:
                yield Send(other, flow)
            else:
                yield Receive(other)

    taken: dict[int, list[float]] = {size: [] for size in SIZES}
    for turn in range(WARM_UP + ROUNDS):
        for size in SIZES:
            started = time.perf_counter()
            ranks.channel().run(to_and_fro(size))
            if turn >= WARM_UP:
                taken[size].append((time.perf_counter() - started) / 2)
    return [statistics.median(taken[size]) for size in SIZES]


def _broadcast(me: Member, ranks: Ranks) -> float:
    taken = []
    for _ in range(WARM_UP + ROUNDS):
        ranks.total([0])
        started = time.perf_counter()
        ranks.channel().execute(Broadcast(me.layout.stages[-1], [0]))
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[WARM_UP:])


@dataclass
class _Timestep:
    """A timestep that was decoded.

    Attributes:
        seconds: that it took.
        slowest: seconds of the blocks and drafting of the slowest rank.
        busiest: seconds of all computing of the busiest group or drafter, heads and tree growth included.
        drafted: nodes that each drafting step expanded.
        nodes: those that each group ran.
    """

    seconds: float
    slowest: float
    busiest: float
    drafted: list[int]
    nodes: list[int]


def _timesteps(me: Member, ranks: Ranks, request: Request) -> list[_Timestep]:
    """Decode a prompt; return its timesteps but the first and the last."""
    output = ranks.channel().run(pipedec(me, request))
    follows = follows_prompt(bool(me.taps), request.tokens)
    first = len(me.layout.groups) if follows else 1  # before it nobody waits for all others
    last = first - 1 + output.timesteps
    computed, did, ended, ran = ([0.0] * (last + 1) for _ in range(4))
    drafted = [[0.0] * (last + 1) for _ in range(request.layers)]
    for task in me.log:
        if task.kind == "V":
            ended[task.seq] = task.end
        elif task.kind in ("C", "own") and task.what != "sync" and task.seq <= last:
            did[task.seq] += task.end - task.start
            computed[task.seq] += (task.end - task.start) * (task.what == "dec")
            if task.node:
                ran[task.seq] += sum(task.nodes)
            for step, expanded in enumerate(() if task.node else task.nodes):
                drafted[step][task.seq] = expanded
    slowest = [max(one) for one in zip(*ranks.gather(computed))]
    rows, units = ranks.gather(did), [*me.layout.groups, [me.layout.drafter]]
    busiest = [max(sum(one[rank] for rank in unit) for unit in units) for one in zip(*rows)]
    ran = ranks.gather(ran)
    nodes = [[int(ran[group[0]][i]) for group in me.layout.groups] for i in range(last + 1)]
    steps = [ranks.gather(one)[me.layout.drafter] for one in drafted]
    drafted = [[int(one[i]) for one in steps if one[i]] for i in range(last + 1)]
    return [
        _Timestep(ended[i] - ended[i - 1], slowest[i], busiest[i], drafted[i], nodes[i])
        for i in range(first + 1, last)
    ]


@dataclass
class _Pass:
    """A pass of some nodes through all stages, one after the other.

    Attributes:
        nodes: their number.
        stages: seconds of the stages' computing.
        rest: seconds of what is neither that nor drafting.
    """

    nodes: int
    stages: float
    rest: float


def _rounds(me: Member, ranks: Ranks, request: Request) -> list[_Pass]:
    """Decode a prompt with static trees; return the passes of its rounds but the first and the last."""
    output = ranks.channel().run(stpp(me, request))
    each = len(me.layout.groups)  # timesteps of a round
    drafting, staged, nodes, ended = ([0.0] * (output.timesteps // each + 1) for _ in range(4))
    for task in me.log:
        if task.kind == "V":
            ended[task.seq // each] = task.end
        elif task.kind == "C" and task.what == "dec":
            (staged if task.node else drafting)[task.seq // each] += task.end - task.start
            nodes[task.seq // each] = sum(task.nodes)
    drafting, staged = ([sum(one) for one in zip(*ranks.gather(own))] for own in (drafting, staged))
    nodes = ranks.gather(nodes)[me.layout.stages[-1]]
    return [
        _Pass(int(nodes[i]), staged[i], ended[i] - ended[i - 1] - staged[i] - drafting[i])
        for i in range(2, len(ended) - 1)
    ]


def _tokens(me: Member, ranks: Ranks, request: Request) -> list[_Pass]:
    """Decode a prompt by plain pipelining; return the passes of its tokens but the first, all with the mean
    of their seconds."""
    output = ranks.channel().run(pp(me, request))
    after = len(output.tokens) - 1
    computed = sum(task.end - task.start for task in me.log if (task.kind, task.what) == ("C", "dec"))
    staged = sum(one for [one] in ranks.gather([computed]))
    return [_Pass(1, staged / after, (output.seconds - staged) / after)] * after if after else []


def _states(tokens: bool, n: int, hidden: int) -> torch.Tensor:
    """Return input of a stage: tokens int64 [n], or states [n, H]."""
    generator = torch.Generator().manual_seed(0)
    return torch.arange(n) if tokens else torch.randn(n, hidden, generator=generator)


def _star(size: int, x: torch.Tensor | None) -> Flow:
    """Return a flow of `size` nodes, a root and its children, with states x [size, H]."""
    return Flow(torch.arange(size), torch.tensor([-1] + [0] * (size - 1)), x)
