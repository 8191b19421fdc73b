"""Steps that the programs of all modes share: prefill, sending and receiving flows, and collecting tapped
states at the drafter."""

from collections.abc import Sequence
from typing import Any

import torch

from drafttrain.inference.session import NOT_FINITE
from drafttrain.pipeline.member import Member, Request
from drafttrain.pipeline.prediction import PredictionTree
from drafttrain.pipeline.stage import Flow
from drafttrain.pipeline.transport import Broadcast, Program, Receive, Send

NOTHING = -2  # in place of a token, at all ranks but the last stage's


def is_done(tokens: Sequence[int], request: Request) -> bool:
    """Return whether an output has ended."""
    if not tokens:
        return False
    return len(tokens) >= request.max_new_tokens or tokens[-1] in (*request.stop, NOT_FINITE)


def prefill(me: Member, request: Request, drafts: bool = True) -> Program:
    """Prefill the prompt, stage after stage; return the first new token and, at the drafter, the tree."""
    found, prompt = NOTHING, torch.tensor(request.tokens)
    out, tapped = yield from _encode(me, prompt)
    if me.is_last:
        with me.computing:
            found = me.pick(out[-1], request, 0)
    [token] = yield Broadcast(me.layout.stages[-1], [found])
    if not drafts:
        return token, None
    tapped = yield from collect(me, tapped)
    return token, _tree(me, request, prompt, tapped, token)


def send_ahead(me: Member, request: Request) -> Program:
    """Prefill all but the last token of the prompt, stage after stage. Return, at the drafter, the tree whose
    root is that token, without waiting for the stages after this one."""
    *begin, root = request.tokens
    prompt = torch.tensor(begin)
    yield from _encode(me, prompt)
    return _tree(me, request, prompt, torch.zeros(len(begin), 0), root)


def _encode(me: Member, prompt: torch.Tensor) -> Program:
    """Run a prompt int64 [n] through this rank's blocks and hand it on; return its states [n, H] and the
    tapped ones [n, taps · H]; None for both without blocks."""
    me.log.clear()
    if me.stage is None:
        return None, None
    me.stage.reset()
    x, before = prompt, me.layout.before(me.rank)
    if before is not None:
        x = (yield from take(me, before, me.node - 1, 0)).x
    with me.computing:
        started = me.clock()
        out, tapped = me.stage.prefill(x)
        me.done("C", "pre", me.node, 0, started)
    if not me.is_last:
        yield from give(me, me.layout.after(me.rank), Flow(prompt, prompt, out), me.node, 0)
    return out, tapped


def _tree(
    me: Member, request: Request, prompt: torch.Tensor, tapped: torch.Tensor | None, root: int
) -> PredictionTree | None:
    """Prefill the drafter and return the prediction tree after the prompt; None at other ranks.

    Args:
        tapped: the target's states at the prompt [n, K · H].
    """
    if me.drafter is None:
        return None
    state = me.drafter.new_state(1, me.room)
    with me.computing:
        started = me.clock()
        read = prompt[None], tapped[None], torch.tensor([len(prompt)])
        me.drafter.update(state, *(one.to(me.device) for one in read))
        me.done("C", "pre", 0, 0, started)
    own = me.drafter, state, root, request.width, request.children, me.device
    if request.best_first:
        from drafttrain.pipeline.best_first import BestFirstTree  # which the paper does not have

        return BestFirstTree(len(me.layout.groups), *own)
    return PredictionTree(*own)


def give(me: Member, to: int, flow: Flow | None, source: int, seq: int) -> Program:
    """Send a node's flow to the rank of the next node in a timestep, and log it."""
    started = me.clock()
    yield Send(to, flow)
    if flow is not None:
        me.done("send", source, source + 1, seq, started)


def take(me: Member, rank: int, source: int, seq: int) -> Program:
    """Receive and return the flow that node `source`, at `rank`, sends in a timestep, and log it."""
    started = me.clock()
    flow = yield Receive(rank)
    if flow is not None:
        me.done("receive", source, source + 1, seq, started)
    return flow


def collect(me: Member, tapped: torch.Tensor | None) -> Program:
    """Send tapped states [m, taps · H] to the drafter; at the drafter, return those of all ranks joined,
    [m, K · H] ([1, 0] for a drafter that reads none), None elsewhere."""
    ranks, drafter = me.tap_ranks, me.layout.drafter
    if me.rank in ranks and me.rank != drafter:
        yield Send(drafter, Flow(torch.zeros(0), torch.zeros(0), tapped))
    if me.drafter is None:
        return None
    parts: dict[int, Any] = {}
    for rank in ranks:
        whole = tapped if rank == me.rank else (yield Receive(rank)).x
        parts[rank] = iter(whole.to(me.device).chunk(sum(owner == rank for _, owner in me.taps), -1))
    # in the order in which the drafter reads them, which need not be that of the stages
    if not parts:
        return torch.zeros(1, 0, device=me.device)
    return torch.cat([next(parts[rank]) for _, rank in me.taps], -1)
