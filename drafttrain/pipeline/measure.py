"""Measurements of a pipeline on its ranks: the costs that `simulate.py` needs.

Stages are timed while all of them work, as in `pipedec`, and while the others wait, as in `pp` and `stpp`:
ranks of one machine share its memory. What a timestep takes besides computing is measured by decoding. All is
measured in rounds of everything in turn, so that a change of the machine's speed meets all alike.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from drafttrain.pipeline.baselines import pp, stpp
from drafttrain.pipeline.distributed import Ranks
from drafttrain.pipeline.member import Member, Request
from drafttrain.pipeline.prediction import PredictionTree, follows_prompt
from drafttrain.pipeline.program import pipedec
from drafttrain.pipeline.simulate import Machines
from drafttrain.pipeline.stage import Flow
from drafttrain.pipeline.transport import Broadcast, Program, Receive, Send
from drafttrain.trees.costs import CostCurve
from drafttrain.utils.errors import UserError

SIZES = (1, 2, 3, 4, 6, 8, 16, 32)  # tokens
CONTEXT, ROUNDS, WARM_UP = 128, 7, 2
MOST_ROUNDS, ENOUGH = 20, 10.0  # rounds of a calibration at most, and seconds for them; ROUNDS at least
NO_TOKEN = -1  # no token of the drafter: advancing a tree by it is a miss, which restarts the tree


@dataclass(frozen=True)
class Work:
    """Work of a rank to time.

    Attributes:
        begin: fills caches before a round, or after other work on them.
        prepare: does for a size what is not timed.
        run: works on a size.
    """

    begin: Callable[[], None]
    prepare: Callable[[int], None]
    run: Callable[[int], None]


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

    def machines(self, mode: str, at_once: int = 1) -> Machines:
        """Return the machines with which to simulate a mode. In `pp` and `stpp` a stage works while the
        others wait if there is one request, and while they work if there are more (`at_once`)."""
        if mode == "pipedec":  # what is sent is part of the timestep's end
            links = [lambda tokens: 0.0] * (len(self.groups) - 1)
            groups, alone = ([self._curve(one) for one in every] for every in (self.groups, self.alone))
            more = {"beside": self.beside, "alone": alone, "draft_alone": self._curve(self.draft_alone)}
            return Machines(groups, links, self._curve(self.draft), self.end, **more)
        last = self.judging if mode == "stpp" else self.alone[-1]
        groups, draft = [*self.alone[:-1], last], self.draft_alone
        if at_once > 1:
            logits = [more - one for more, one in zip(last, self.alone[-1])]
            last = [one + max(more, 0.0) for one, more in zip(self.groups[-1], logits)]
            groups, draft = [*self.groups[:-1], last], self.draft
        groups = [self._curve(one) for one in groups]
        links, broadcast = [self._curve(self.hop)] * (len(groups) - 1), self.broadcast
        measured = self.round if mode == "stpp" else self.token  # earlier versions did not measure it
        if measured and at_once == 1:  # other requests use the time
            links, broadcast = [lambda tokens: 0.0] * len(links), measured
        return Machines(groups, links, self._curve(draft), broadcast=broadcast)

    @property
    def end(self) -> float:
        """Return the seconds of a timestep that the curves of groups and drafter do not include."""
        return self.waiting or self.sync  # earlier versions measured only `sync`

    def _curve(self, seconds: Sequence[float]) -> CostCurve:
        from sklearn.isotonic import isotonic_regression

        return CostCurve(self.sizes, isotonic_regression(seconds).tolist())  # noise may make times fall


@torch.no_grad()
def measure(me: Member, ranks: Ranks, requests: Sequence[Request], hidden: int) -> PipelineCosts:
    """Measure the parts of a pipeline; all ranks must call it.

    Args:
        requests: prompts to decode for `sync`, `waiting`, `round` and `token`.
        hidden: size of the target's states.
    """
    layout, n = me.layout, len(SIZES)
    stage, draft = stage_work(me, hidden), draft_work(me, hidden)
    judge = stage_work(me, hidden, judges=True) if me.is_last else stage
    parts = [
        (stage or draft, ()),  # together
        (draft or stage, ()),  # beside a stage it takes turns with that
        (stage, layout.stages),
        (judge, layout.stages[-2:]),  # another stage's weights pass the caches in between
        (draft, ()),
    ]
    steps, rounds, tokens = [], [], []

    def one_round() -> list[float]:
        for work in (stage, draft):  # what decoded prompts have left gives way
            if work is not None:
                work.begin()
        own = [time_once(ranks, work, SIZES, in_turn) for work, in_turn in parts]
        return [*(s for one in own for s in one), *_hops(me, ranks, hidden), _broadcast(me, ranks)]

    for _ in range(WARM_UP):
        began = time.perf_counter()
        one_round()
    [longest] = max(ranks.gather([time.perf_counter() - began]))
    taken, n_rounds = [], min(max(int(ENOUGH / longest), ROUNDS), MOST_ROUNDS)
    for done in range(n_rounds):
        taken.append(one_round())
        for request in requests[len(requests) * done // n_rounds : len(requests) * (done + 1) // n_rounds]:
            steps += _timesteps(me, ranks, request)
            rounds += _rounds(me, ranks, request)
            tokens += _tokens(me, ranks, request)
    if not steps:
        raise UserError(
            "max_new_tokens: outputs must take three timesteps or more to measure their ends, got shorter "
            "ones; raise it, or name other prompts"
        )
    sync = statistics.fmean(step.seconds - step.slowest for step in steps)
    waiting = statistics.fmean(step.seconds - step.busiest for step in steps)
    means = [statistics.fmean(one) if one else 0.0 for one in (rounds, tokens)]
    own = [statistics.fmean(one) for one in zip(*taken)]  # decoding pays for slow moments, too
    rows = ranks.gather([*own, sync, waiting, *means])

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

    return PipelineCosts(
        list(SIZES),
        [group(members, 0) for members in layout.groups],
        [group(members, 2) for members in layout.groups],
        group(layout.groups[-1], 2, last=3),
        of(layout.drafter, 1),
        of(layout.drafter, 4),
        hop,
        broadcast,
        sync,
        layout.drafter in layout.stages,
        waiting,
        round_,
        token,
    )


def times(ranks: Ranks, work: Work | None, sizes: Sequence[int]) -> list[float]:
    """Return this rank's median seconds by size while all ranks work, 0 without work."""
    if work is not None:
        work.begin()
    taken = [time_once(ranks, work, sizes) for _ in range(WARM_UP + ROUNDS)]
    return [statistics.median(one) for one in zip(*taken[WARM_UP:])]


def time_once(
    ranks: Ranks, work: Work | None, sizes: Sequence[int], in_turn: Sequence[int] = ()
) -> list[float]:
    """Return this rank's seconds by size, 0 without work. All ranks start together, or those of `in_turn` one
    after the other, as in `pp`, where each evicts what the one before left in the caches."""
    taken = [0.0] * len(sizes)
    ranks.total([0])  # what is prepared here would disturb others' last size
    for i, size in enumerate(sizes):
        if work is not None:
            work.prepare(size)
        for rank in in_turn or [ranks.rank]:
            ranks.total([0])  # waits for all
            if work is None or rank != ranks.rank:
                continue
            started = time.perf_counter()
            work.run(size)
            taken[i] = time.perf_counter() - started
    return taken


def stage_work(me: Member, hidden: int, judges: bool = False, sizes: Sequence[int] = SIZES) -> Work | None:
    """Return the work of a stage: a forward over a root and its children, `size` nodes; at the last stage
    also picking a token or, if it `judges`, the logits of all nodes. None without a stage."""
    if me.stage is None:
        return None
    stage, request = me.stage, Request([], 0)
    inputs = _states(stage.part.is_first, max(CONTEXT, *sizes), hidden)

    def begin() -> None:
        stage.reset()
        stage.prefill(inputs[:CONTEXT])
        stage.cache.reserve(max(sizes))
        me.wait()

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

    return Work(begin, lambda size: None, run)


def draft_work(me: Member, hidden: int, sizes: Sequence[int] = SIZES) -> Work | None:
    """Return the work of a draft step over a layer of `size` nodes; None without a drafter."""
    if me.drafter is None:
        return None
    tapped = torch.zeros(CONTEXT, len(me.taps) * hidden, dtype=me.drafter.dtype, device=me.device)
    tokens = torch.arange(CONTEXT, device=me.device)[None]  # [1, n]
    tree: PredictionTree | None = None

    def begin() -> None:
        nonlocal tree
        tree = None

    def prepare(size: int) -> None:
        nonlocal tree
        if tree is None:
            room = 1 + max(sizes) + len(sizes) * (WARM_UP + ROUNDS)  # a tree, and the roots before it
            state = me.drafter.new_state(1, CONTEXT + room)
            me.drafter.update(state, tokens, tapped[None], tokens.new_tensor([CONTEXT]))
        else:
            tree.advance(NO_TOKEN, tapped[:1])
            state = tree.state
        tree = PredictionTree(me.drafter, state, 0, size, size, me.device)
        tree.expand()
        tree.grow(1)
        me.wait()

    def run(size: int) -> None:
        started = time.perf_counter()
        tree.expand()
        tree.grow(2)
        me.wait()
        me.draft_pace.wait(started)

    return Work(begin, prepare, run)


def _hops(me: Member, ranks: Ranks, hidden: int) -> list[float]:
    """Return the seconds of a message from the first stage to the second, by size: half of a round trip;
    zeros at other ranks and for a single stage."""
    stages, taken = me.layout.stages, [0.0] * len(SIZES)
    if len(stages) < 2 or me.rank not in stages[:2]:
        return taken
    sends, other = me.rank == stages[0], stages[1] if me.rank == stages[0] else stages[0]

    def to_and_fro(size: int) -> Program:
        flow = _star(size, _states(False, size, hidden).to(me.stage.part.state_dtype))
        for is_sending in (sends, not sends):
            if is_sending:
                yield Send(other, flow)
            else:
                yield Receive(other)

    for i, size in enumerate(SIZES):
        started = time.perf_counter()
        ranks.channel().run(to_and_fro(size))
        taken[i] = (time.perf_counter() - started) / 2
    return taken


def _broadcast(me: Member, ranks: Ranks) -> float:
    """Return the seconds of the broadcast of a token."""
    ranks.total([0])
    started = time.perf_counter()
    ranks.channel().execute(Broadcast(me.layout.stages[-1], [0]))
    return time.perf_counter() - started


@dataclass
class _Timestep:
    """Seconds of a timestep that was decoded.

    Attributes:
        seconds: that it took.
        slowest: of the blocks and drafting of the slowest rank.
        busiest: of all computing of the busiest group or drafter, heads and tree growth included.
    """

    seconds: float
    slowest: float
    busiest: float


def _timesteps(me: Member, ranks: Ranks, request: Request) -> list[_Timestep]:
    """Decode a prompt; return its timesteps but the first and the last."""
    output = ranks.channel().run(pipedec(me, request))
    follows = follows_prompt(bool(me.taps), request.tokens)
    first = len(me.layout.groups) if follows else 1  # before it nobody waits for all others
    last = first - 1 + output.timesteps
    computed, did, ended = ([0.0] * (last + 1) for _ in range(3))
    for task in me.log:
        if task.kind == "V":
            ended[task.seq] = task.end
        elif task.kind in ("C", "own") and task.what != "sync" and task.seq <= last:
            did[task.seq] += task.end - task.start
            computed[task.seq] += (task.end - task.start) * (task.what == "dec")
    slowest = [max(one) for one in zip(*ranks.gather(computed))]
    rows, units = ranks.gather(did), [*me.layout.groups, [me.layout.drafter]]
    busiest = [max(sum(one[rank] for rank in unit) for unit in units) for one in zip(*rows)]
    return [_Timestep(ended[i] - ended[i - 1], slowest[i], busiest[i]) for i in range(first + 1, last)]


def _rounds(me: Member, ranks: Ranks, request: Request) -> list[float]:
    """Decode a prompt with static trees; return the seconds of each round but the first and the last without
    the computing of stages and drafter."""
    output = ranks.channel().run(stpp(me, request))
    each = len(me.layout.groups)  # timesteps of a round
    computed, ended = ([0.0] * (output.timesteps // each + 1) for _ in range(2))
    for task in me.log:
        if task.kind == "V":
            ended[task.seq // each] = task.end
        elif task.kind == "C" and task.what == "dec":
            computed[task.seq // each] += task.end - task.start
    computed = [sum(one) for one in zip(*ranks.gather(computed))]
    return [ended[i] - ended[i - 1] - computed[i] for i in range(2, len(ended) - 1)]


def _tokens(me: Member, ranks: Ranks, request: Request) -> list[float]:
    """Decode a prompt by plain pipelining; return the seconds of each token but the first without the
    computing of stages, all their mean."""
    output = ranks.channel().run(pp(me, request))
    after = len(output.tokens) - 1
    computed = sum(task.end - task.start for task in me.log if (task.kind, task.what) == ("C", "dec"))
    staged = sum(one for [one] in ranks.gather([computed]))
    return [(output.seconds - staged) / after] * after if after else []


def _states(tokens: bool, n: int, hidden: int) -> torch.Tensor:
    """Return input of a stage: tokens int64 [n], or states [n, H]."""
    generator = torch.Generator().manual_seed(0)
    return torch.arange(n) if tokens else torch.randn(n, hidden, generator=generator)


def _star(size: int, x: torch.Tensor | None) -> Flow:
    """Return a flow of `size` nodes, a root and its children, with states x [size, H]."""
    return Flow(torch.arange(size), torch.tensor([-1] + [0] * (size - 1)), x)
