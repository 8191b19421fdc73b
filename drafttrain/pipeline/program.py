"""The program of each rank for one prompt: encode it, then decode in one of three modes.

`pp`: a token passes all stages before the next one begins. `stpp`: so does a whole tree of drafts, whose
accepted path is emitted. `pipedec`: in each timestep every stage works on another layer of one tree, whose
root leaves the last stage next (PipeDec, §3.4); a timestep is computing, a broadcast of the token that
follows the root, and sending. A drafter that is faster than a stage may add several layers in a timestep
(ours): they go through the stages together, and so several tokens may leave the last one at once.
"""

import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from drafttrain.inference.acceptance import AcceptanceRule, SamplingRule, rule_for
from drafttrain.inference.params import SamplingParams
from drafttrain.inference.sampling import Sampler
from drafttrain.inference.session import NOT_FINITE
from drafttrain.pipeline.prediction import PredictionTree, child_of, draft
from drafttrain.pipeline.stage import Flow, Stage
from drafttrain.pipeline.transport import Broadcast, Program, Receive, Send
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.interface import TreePolicy

NOTHING = -2  # in place of a token: not at the last stage


@dataclass(frozen=True)
class Layout:
    """Who does what.

    Attributes:
        groups: ranks that work on one layer of the tree, one after the other, from the first blocks to the
            last; every rank is in one group, but for a drafter that is alone.
        drafter: rank that drafts, alone or beside a stage.
    """

    groups: tuple[tuple[int, ...], ...]
    drafter: int = 0

    @property
    def stages(self) -> list[int]:
        """Ranks with blocks, in order."""
        return [rank for group in self.groups for rank in group]

    def before(self, rank: int) -> int | None:
        """Return the stage before this one, None for the first."""
        place = self.stages.index(rank)
        return self.stages[place - 1] if place else None

    def after(self, rank: int) -> int | None:
        """Return the stage after this one, None for the last."""
        place = self.stages.index(rank) + 1
        return self.stages[place] if place < len(self.stages) else None

    def begins(self, rank: int) -> bool:
        """Return whether this is the first of its group."""
        return any(group[0] == rank for group in self.groups)

    def ends(self, rank: int) -> bool:
        """Return whether this is the last of its group."""
        return any(group[-1] == rank for group in self.groups)


@dataclass
class Request:
    """One prompt.

    Attributes:
        tokens: of the prompt.
        max_new_tokens: limit of the output.
        stop: tokens that end it.
        sampling: how tokens are drawn.
        width, children: of the prediction tree.
        depth: layers of a static tree at most.
        layers: that the prediction tree grows by in a timestep.
    """

    tokens: Sequence[int]
    max_new_tokens: int
    stop: Collection[int] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    width: int = 4
    children: int = 4
    depth: int = 5
    layers: int = 1


@dataclass
class Output:
    """The outcome at a rank.

    Attributes:
        tokens: emitted.
        hits: how many of them were in the tree when they left the last stage.
        timesteps: after the prompt.
        seconds: after the prompt and the first token.
    """

    tokens: list[int]
    hits: int = 0
    timesteps: int = 0
    seconds: float = field(default=0.0, compare=False)


@dataclass
class Pace:
    """A declared time for which a device is held, in place of that of this machine.

    Attributes:
        seconds: that a piece of work takes; None: as long as it does here.
        held, late: how many pieces there were, and how many took longer than declared.
    """

    seconds: float | None = None
    held: int = 0
    late: int = 0

    def wait(self, started: float) -> None:
        """Sleep until a piece of work that was started then may end."""
        if self.seconds is None:
            return
        left = started + self.seconds - time.perf_counter()
        self.held, self.late = self.held + 1, self.late + (left < 0)
        if left > 0:
            time.sleep(left)


class Task(NamedTuple):
    """Something that a rank has done, as the paper's tuples (Appendix B) with times: computing (C, type,
    node, timestep), the sending or the receiving half of a transfer (T, source, destination, timestep), or
    the end of a timestep (V, finish, node, timestep). The drafter is node 0, the i-th stage node i.

    Attributes:
        kind: "C", "send", "receive" or "V"; "own" for what the paper does not list.
        what: "pre", "dec" or "sync" of C, "finish" of V, "grow" or "pick" of own; the source of a transfer.
        node: of C and V, and the destination of a transfer.
        seq: the timestep; 0 is the prompt's.
        start, end: seconds.
    """

    kind: str
    what: str | int
    node: int
    seq: int
    start: float
    end: float


@dataclass
class Member:
    """A rank: its blocks, its drafter, or both.

    Attributes:
        stage_pace, draft_pace: of its stage and of a drafting step.
        log: what it has done for the last request in mode pipedec.
        clock: seconds, the same for all ranks of a machine.
        device: held while something is computed: members of several requests share it.
        policy: how static trees grow, for `stpp`.
        taps: blocks whose states the drafter reads, and the rank that each of them is on.
        room: tokens of the longest sequence, drafts included.
    """

    rank: int
    layout: Layout
    stage: Stage | None = None
    drafter: Drafter | None = None
    policy: TreePolicy | None = None
    taps: Sequence[tuple[int, int]] = ()
    room: int = 2048
    stage_pace: Pace = field(default_factory=Pace)
    draft_pace: Pace = field(default_factory=Pace)
    log: list[Task] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic

    device: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def twin(self) -> "Member":
        """Return a member for another request at the same time: weights, paces and device are shared."""
        stage = None if self.stage is None else Stage(self.stage.part, self.stage.room)
        return replace(self, stage=stage, log=[])

    @property
    def node(self) -> int:
        """The number of its stage from 1 on; 0 without one."""
        return 0 if self.stage is None else self.layout.stages.index(self.rank) + 1

    def done(self, kind: str, what: str | int, node: int, seq: int, start: float) -> None:
        """Log a task that ends now."""
        self.log.append(Task(kind, what, node, seq, start, self.clock()))

    @property
    def tap_ranks(self) -> list[int]:
        """Ranks that send states to the drafter, in the order of their blocks."""
        return sorted({rank for _, rank in self.taps}, key=self.layout.stages.index)

    @property
    def is_last(self) -> bool:
        return self.rank == self.layout.stages[-1]

    def pick(self, state: torch.Tensor, request: Request, position: int) -> int:
        """Return the target's token after a state [H], at this position of the output; NOT_FINITE for NaN."""
        logits = self.stage.part.logits(state[None])[None]  # [1, 1, V]
        place = torch.tensor([[position]])
        token = int(Sampler([request.sampling]).pick(logits.float(), place))
        return token if bool(logits[0, 0, token].isfinite()) else NOT_FINITE


def pipedec(me: Member, request: Request) -> Program:
    """Decode with a tree in flight; return an `Output`."""
    token, tree = yield from _prefill(me, request)
    output, flow, tapped, began = Output([token]), None, None, me.clock()
    left: list[int] = []  # tokens that have left the last stage
    while not _is_done(output.tokens, request):
        growing = _grow(me, tree, left, tapped, request, output)
        flow = yield from _transmit(me, flow, growing, output.timesteps)
        output.timesteps += 1
        if tree is not None:
            _draft(me, tree, request, output)
        out = yield from _compute(me, flow, output.timesteps)
        found, started = [], me.clock()
        if me.is_last and out is not None:
            found = _leaving(me, out, request, len(output.tokens))
            me.done("own", "pick", me.node, output.timesteps, started)
        message = [len(found), *found, *[NOTHING] * (request.layers - len(found))]
        count, *left = yield Broadcast(me.layout.stages[-1], message, 1 + request.layers)
        flow, left = out if me.stage is not None and me.layout.ends(me.rank) else None, left[:count]
        output.tokens += left
        if _is_done(output.tokens, request):
            if tree is not None:
                output.hits += len(left) - 1  # those that others have left the last stage with
            break
        if left and me.stage is not None:
            started, at_roots = me.clock(), []
            for token in left:
                at_roots.append(me.stage.root_tapped())
                flow = me.stage.advance(token, flow)
            tapped = torch.cat(at_roots)  # [m, taps · H]
            me.done("C", "sync", me.node, output.timesteps, started)
        me.done("V", "finish", me.node, output.timesteps, me.clock())
    output.seconds = me.clock() - began
    return output


def _leaving(me: Member, out: Flow, request: Request, position: int) -> list[int]:
    """Return the target's tokens after the root that leaves the last stage, and after those of its
    successors that leave with it.

    Args:
        position: of the first of them in the output.
    """
    tree, node, found = me.stage.tree, 0, []
    while node is not None and node < len(out.x):
        found.append(me.pick(out.x[node], request, position + len(found)))
        if found[-1] == NOT_FINITE or found[-1] in request.stop:
            break
        if position + len(found) >= request.max_new_tokens:
            break
        node = child_of(tree, node, found[-1])
    return found


def _grow(
    me: Member,
    tree: PredictionTree | None,
    left: Sequence[int],
    tapped: torch.Tensor | None,
    request: Request,
    output: Output,
) -> Program:
    """Go on after the tokens that have left the last stage (PipeDec, §3.4.3); return the tree's new nodes at
    the drafter.

    Args:
        tapped: states at the roots before them [m, taps · H] on this rank.
    """
    if left:
        tapped = yield from _collect(me, tapped)
    if tree is None:
        return None
    started = me.clock()
    if left:
        for token, at_root in zip(left, tapped.expand(len(left), -1).split(1)):  # one row without taps
            output.hits += tree.advance(token, at_root)
        me.done("C", "sync", 0, output.timesteps, started)
        started = me.clock()
    tree.grow(_max_depth(request, output))
    taken = tree.take()
    me.done("own", "grow", me.node, output.timesteps + 1, started)
    return None if taken is None else Flow(taken.tokens, taken.parents)


def _draft(me: Member, tree: PredictionTree, request: Request, output: Output) -> None:
    clock, started, steps = me.clock(), time.perf_counter(), 0
    for _ in draft(tree, request.layers, _max_depth(request, output)):
        me.draft_pace.wait(started)
        started, steps = time.perf_counter(), steps + 1
    if steps:
        me.done("C", "dec", 0, output.timesteps, clock)


def _max_depth(request: Request, output: Output) -> int:
    """Return how deep a tree may be: nothing is needed after the last token."""
    return request.max_new_tokens - len(output.tokens) - 1


def pp(me: Member, request: Request) -> Program:
    """Decode a token at a time; return an `Output`."""
    token, _ = yield from _prefill(me, request, drafts=False)
    output, began = Output([token]), me.clock()
    while not _is_done(output.tokens, request):
        output.timesteps += len(me.layout.groups)
        found = NOTHING
        if me.stage is not None:
            flow = Flow(torch.tensor([token]), torch.tensor([-1]))
            if (before := me.layout.before(me.rank)) is not None:
                flow = yield Receive(before)
            with me.device:
                started = time.perf_counter()
                out = me.stage.compute(flow)
                me.stage_pace.wait(started)
                if me.is_last:
                    found = me.pick(out.x[0], request, len(output.tokens))
            if not me.is_last:
                yield Send(me.layout.after(me.rank), out)
        [token] = yield Broadcast(me.layout.stages[-1], [found])
        output.tokens.append(token)
        if me.stage is not None:
            me.stage.advance(token)
    output.seconds = me.clock() - began
    return output


def stpp(me: Member, request: Request) -> Program:
    """Decode with a static tree of drafts for each forward; return an `Output`."""
    token, tree = yield from _prefill(me, request)
    state, output, layout = None if tree is None else tree.state, Output([token]), me.layout
    accept, began = rule_for([request.sampling], draws=False), me.clock()
    if isinstance(accept, SamplingRule):
        accept.emitted = [1]  # the first token is drawn
    while not _is_done(output.tokens, request):
        output.timesteps += len(layout.groups)
        flow = None
        if me.drafter is not None:
            with me.device:
                started = time.perf_counter()
                drafts = me.policy.grow(me.drafter, state, torch.tensor([token]))
                for _ in range(int(drafts.depths.max())):  # a step for each layer
                    me.draft_pace.wait(started)
                    started = time.perf_counter()
            flow = Flow(drafts.tokens[0], drafts.parents[0])
            if me.rank != layout.stages[0]:
                yield Send(layout.stages[0], flow)
        found = []
        if me.stage is not None:
            if me.rank == layout.stages[0] and me.drafter is None:
                flow = yield Receive(layout.drafter)
            elif me.rank != layout.stages[0]:
                flow = yield Receive(layout.before(me.rank))
            with me.device:
                started = time.perf_counter()
                out = me.stage.compute_tree(flow)
                me.stage_pace.wait(started)
                if me.is_last:
                    found = _judge(me.stage, out, accept, request.depth)
            if not me.is_last:
                yield Send(layout.after(me.rank), out)
        token, count, *rest = yield Broadcast(layout.stages[-1], found, 2 + 2 * (request.depth + 1))
        path, drafted = rest[:count], rest[request.depth + 1 :][: count - 1]
        for place, emitted in enumerate([*drafted, token]):
            if not _is_done(output.tokens, request):
                output.tokens.append(emitted)
                output.hits += place < len(drafted)
        if _is_done(output.tokens, request):
            break
        tapped = yield from _collect(me, None if me.stage is None else me.stage.tapped[0, path])
        if me.stage is not None:
            me.stage.commit(path)
        if me.drafter is not None:
            verified = drafts.tokens[:, path]  # [1, m]
            with me.device:
                me.drafter.update(state, verified, tapped[None], torch.tensor([len(path)]))
    output.seconds = me.clock() - began
    return output


def _judge(stage: Stage, out: Flow, accept: AcceptanceRule, depth: int) -> list[int]:
    """Return the target's token after the accepted path, the number of its nodes, the nodes, and the tokens
    of all but the root; both lists have room for a path of `depth` drafts."""
    logits = stage.part.logits(out.x)[None]  # [1, n, V]
    found = accept(stage.tree, logits.float())
    count, token = int(found.counts), int(found.next_token)
    path = found.path[0, :count].tolist()
    if not bool(logits[0, path[-1], token].isfinite()):
        token = NOT_FINITE
    drafted, room = stage.tree.tokens[0, path[1:]].tolist(), depth + 1
    return [token, count, *path, *[0] * (room - count), *drafted, *[0] * (room - len(drafted))]


def _is_done(tokens: Sequence[int], request: Request) -> bool:
    return len(tokens) >= request.max_new_tokens or tokens[-1] in (*request.stop, NOT_FINITE)


def _prefill(me: Member, request: Request, drafts: bool = True) -> Program:
    """Encode the prompt, stage after stage; return its first token and, at the drafter, the tree."""
    found, tapped, prompt = NOTHING, None, torch.tensor(request.tokens)
    me.log.clear()
    if me.stage is not None:
        me.stage.reset()
        x, before = prompt, me.layout.before(me.rank)
        if before is not None:
            x = (yield from _take(me, before, me.node - 1, 0)).x
        with me.device:
            started = me.clock()
            out, tapped = me.stage.prefill(x)
            me.done("C", "pre", me.node, 0, started)
            if me.is_last:
                found = me.pick(out[-1], request, 0)
        if not me.is_last:
            yield from _give(me, me.layout.after(me.rank), Flow(prompt, prompt, out), me.node, 0)
    [token] = yield Broadcast(me.layout.stages[-1], [found])
    if not drafts:
        return token, None
    tapped = yield from _collect(me, tapped)
    if me.drafter is None:
        return token, None
    state = me.drafter.new_state(1, me.room)
    with me.device:
        me.drafter.update(state, prompt[None], tapped[None], torch.tensor([len(prompt)]))
    return token, PredictionTree(me.drafter, state, token, request.width, request.children)


def _compute(me: Member, flow: Flow | None, seq: int) -> Program:
    """Run what has come through this rank's blocks; in a group after the rank before it."""
    if me.stage is None:
        return None
    if not me.layout.begins(me.rank):
        flow = yield from _take(me, me.layout.before(me.rank), me.node - 1, seq)
    out, started, clock = None, time.perf_counter(), me.clock()
    if flow is not None:
        out = me.stage.compute(flow)
        me.stage_pace.wait(started)
        me.done("C", "dec", me.node, seq, clock)
    if not me.layout.ends(me.rank):
        yield from _give(me, me.layout.after(me.rank), out, me.node, seq)
    return out


def _transmit(me: Member, out: Flow | None, growing: Program, seq: int) -> Program:
    """Send what has been computed to the next group, and a new layer to the first; return what has come.

    Every other node receives before it sends, so that none is in two transfers at once (Appendix A). A first
    stage with the drafter beside it sends before the tree grows, as the next stage waits.
    """
    if me.node % 2:
        yield from _pass_on(me, out, None, seq)
        return (yield from _fetch(me, (yield from growing), seq))
    layer = yield from growing
    found = yield from _fetch(me, layer, seq)
    yield from _pass_on(me, out, layer, seq)
    return found


def _pass_on(me: Member, out: Flow | None, layer: Flow | None, seq: int) -> Program:
    layout, first = me.layout, me.layout.stages[0]
    if me.drafter is not None and me.rank != first:
        yield from _give(me, first, layer, 0, seq)
    elif me.stage is not None and layout.ends(me.rank) and not me.is_last:
        yield from _give(me, layout.after(me.rank), out, me.node, seq)


def _fetch(me: Member, layer: Flow | None, seq: int) -> Program:
    layout = me.layout
    if me.stage is None or not layout.begins(me.rank):
        return None
    if me.node > 1:
        return (yield from _take(me, layout.before(me.rank), me.node - 1, seq))
    return layer if me.drafter is not None else (yield from _take(me, layout.drafter, 0, seq))


def _give(me: Member, to: int, flow: Flow | None, source: int, seq: int) -> Program:
    started = me.clock()
    yield Send(to, flow)
    if flow is not None:
        me.done("send", source, source + 1, seq, started)


def _take(me: Member, rank: int, source: int, seq: int) -> Program:
    started = me.clock()
    flow = yield Receive(rank)
    if flow is not None:
        me.done("receive", source, source + 1, seq, started)
    return flow


def _collect(me: Member, tapped: torch.Tensor | None) -> Program:
    """Send tapped states [m, taps · H] to the drafter; there return those of all blocks that it reads."""
    ranks, drafter = me.tap_ranks, me.layout.drafter
    if me.rank in ranks and me.rank != drafter:
        yield Send(drafter, Flow(torch.zeros(0), torch.zeros(0), tapped))
    if me.drafter is None:
        return None
    parts: dict[int, Any] = {}
    for rank in ranks:
        whole = tapped if rank == me.rank else (yield Receive(rank)).x
        parts[rank] = iter(whole.chunk(sum(owner == rank for _, owner in me.taps), -1))
    # in the order in which the drafter reads them, which need not be that of the stages
    return torch.cat([next(parts[rank]) for _, rank in me.taps], -1) if parts else torch.zeros(1, 0)
