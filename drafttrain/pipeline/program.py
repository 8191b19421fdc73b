"""The program of each rank in mode `pipedec`: in each timestep every stage works on another layer of one
tree, whose root leaves the last stage next (PipeDec, §3.4).

A timestep is computing, a broadcast of the token that follows the root, and sending. A drafter that is faster
than a stage may add several layers in a timestep (ours): they go through the stages together, and so several
tokens may leave the last one at once. If the drafter reads tokens alone the first layers follow the prompt
(ours), whose last token is the root: they are in the stages by the time the first token is known.
"""

import time
from collections.abc import Sequence

import torch

from drafttrain.inference.session import NOT_FINITE
from drafttrain.pipeline.exchange import (
    NOTHING,
    collect,
    give,
    is_done,
    prefill,
    send_ahead,
    take,
)
from drafttrain.pipeline.member import Member, Output, Request
from drafttrain.pipeline.prediction import PredictionTree, child_of, draft, follows_prompt
from drafttrain.pipeline.stage import Flow
from drafttrain.pipeline.transport import Broadcast, Program


def pipedec(me: Member, request: Request) -> Program:
    """Decode with a tree in flight; return an `Output`."""
    groups, follows = len(me.layout.groups), follows_prompt(bool(me.taps), request.tokens)
    if follows:
        tree = yield from send_ahead(me, request)
        output, began = Output([]), None
    else:
        token, tree = yield from prefill(me, request)
        output, began = Output([token]), me.clock()
    flow, tapped, seq = None, None, 0
    left: list[int] = []  # tokens that have left the last stage
    while not is_done(output.tokens, request):
        growing = _grow(me, tree, left, tapped, request, output, seq)
        flow = yield from _transmit(me, flow, growing, seq)
        seq += 1
        if tree is not None:
            _draft(me, tree, request, output, seq)
        out, count = (yield from _compute(me, flow, seq)), 0
        if not follows or seq >= groups:  # before, nothing leaves, and no rank waits for a slower prefill
            found, started = [], me.clock()
            if me.is_last and out is not None:
                found = _leaving(me, out, request, len(output.tokens))
                me.done("own", "pick", me.node, seq, started)
            message = [len(found), *found, *[NOTHING] * (request.layers - len(found))]
            count, *left = yield Broadcast(me.layout.stages[-1], message)
        flow, left = out if me.stage is not None and me.layout.ends(me.rank) else None, left[:count]
        output.tokens += left
        if began is None and left:
            began = me.clock()
        if is_done(output.tokens, request):
            if tree is not None:
                output.hits += len(left) - 1  # the nodes of all but the last one left, too
            break
        if left and me.stage is not None:
            started, at_roots = me.clock(), []
            for token in left:
                at_roots.append(me.stage.root_tapped())
                flow = me.stage.advance(token, flow)
            tapped = torch.cat(at_roots)  # [m, taps · H]
            me.done("C", "sync", me.node, seq, started)
        me.done("V", "finish", me.node, seq, me.clock())
    output.timesteps = seq - (groups - 1 if follows else 0)
    output.judged = max(len(output.tokens) - (1 if follows else 2), 0)  # not the last one
    output.seconds = me.clock() - began
    return output


def _leaving(me: Member, out: Flow, request: Request, position: int) -> list[int]:
    """Return the target's tokens after the root, which leaves the last stage, and after those of its hits
    that leave with it.

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
    seq: int,
) -> Program:
    """Advance the tree by the tokens that have left the last stage and grow it (PipeDec, §3.4.3); return its
    new nodes at the drafter, None elsewhere.

    Args:
        tapped: states at the roots before them [m, taps · H] on this rank.
    """
    if left:
        tapped = yield from collect(me, tapped)
    if tree is None:
        return None
    started = me.clock()
    if left:
        for token, at_root in zip(left, tapped.expand(len(left), -1).split(1)):  # one row without taps
            output.hits += tree.advance(token, at_root)
        me.done("C", "sync", 0, seq, started)
        started = me.clock()
    tree.grow(_max_depth(request, output))
    taken = tree.take()
    me.done("own", "grow", me.node, seq + 1, started)
    return None if taken is None else Flow(taken.tokens.cpu(), taken.parents.cpu())


def _draft(me: Member, tree: PredictionTree, request: Request, output: Output, seq: int) -> None:
    clock, started, expanded = me.clock(), time.perf_counter(), []
    for nodes in draft(tree, request.layers, _max_depth(request, output)):
        me.wait()
        me.draft_pace.wait(started)
        started = time.perf_counter()
        expanded.append(nodes)
    if expanded:
        me.done("C", "dec", 0, seq, clock, expanded)


def _max_depth(request: Request, output: Output) -> int:
    """Return the maximum depth of the tree: no draft is needed after the last token."""
    return request.max_new_tokens - len(output.tokens) - 1


def _compute(me: Member, flow: Flow | None, seq: int) -> Program:
    """Run new nodes through this rank's blocks, received from and sent to neighbours within its group."""
    if me.stage is None:
        return None
    if not me.layout.begins(me.rank):
        flow = yield from take(me, me.layout.before(me.rank), me.node - 1, seq)
    out, started, clock = None, time.perf_counter(), me.clock()
    if flow is not None:
        out = me.stage.compute(flow)
        me.wait()
        me.stage_pace.wait(started, len(flow.tokens))
        me.done("C", "dec", me.node, seq, clock, [len(flow.tokens)])
    if not me.layout.ends(me.rank):
        yield from give(me, me.layout.after(me.rank), out, me.node, seq)
    return out


def _transmit(me: Member, out: Flow | None, growing: Program, seq: int) -> Program:
    """Send computed nodes to the next group and new layers to the first stage; return what is received.

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
        yield from give(me, first, layer, 0, seq)
    elif me.stage is not None and layout.ends(me.rank) and not me.is_last:
        yield from give(me, layout.after(me.rank), out, me.node, seq)


def _fetch(me: Member, layer: Flow | None, seq: int) -> Program:
    layout = me.layout
    if me.stage is None or not layout.begins(me.rank):
        return None
    if me.node > 1:
        return (yield from take(me, layout.before(me.rank), me.node - 1, seq))
    return layer if me.drafter is not None else (yield from take(me, layout.drafter, 0, seq))
