"""The programs of the baselines (PipeDec, §4.2). `pp`: a token passes all stages before the next one begins.
`stpp`: a whole static tree of draft tokens does, and its accepted path is emitted. `slm`: the small LM that
otherwise drafts decodes alone.
"""

import time

import torch

from drafttrain.inference.acceptance import AcceptanceRule, rule_for
from drafttrain.inference.drawing import SamplingRule
from drafttrain.inference.sampling import Sampler
from drafttrain.inference.session import NOT_FINITE
from drafttrain.pipeline.exchange import NOTHING, collect, is_done, prefill
from drafttrain.pipeline.member import Member, Output, Request
from drafttrain.pipeline.prediction import Counting
from drafttrain.pipeline.stage import Flow, Stage
from drafttrain.pipeline.transport import Broadcast, Program, Receive, Send
from drafttrain.trees.tree import TokenTree


def pp(me: Member, request: Request) -> Program:
    """Decode a token at a time; return an `Output`."""
    token, _ = yield from prefill(me, request, drafts=False)
    output, began = Output([token]), me.clock()
    while not is_done(output.tokens, request):
        output.timesteps += len(me.layout.groups)
        found = NOTHING
        if me.stage is not None:
            flow = Flow(torch.tensor([token]), torch.tensor([-1]))
            if (before := me.layout.before(me.rank)) is not None:
                flow = yield Receive(before)
            with me.computing:
                clock, started = me.clock(), time.perf_counter()
                out = me.stage.compute(flow)
                me.wait()
                me.stage_pace.wait(started)
                if me.is_last:
                    found = me.pick(out.x[0], request, len(output.tokens))
                me.done("C", "dec", me.node, output.timesteps, clock)
            if not me.is_last:
                yield Send(me.layout.after(me.rank), out)
        [token] = yield Broadcast(me.layout.stages[-1], [found])
        output.tokens.append(token)
        if me.stage is not None:
            me.stage.advance(token)
    output.seconds = me.clock() - began
    return output


def stpp(me: Member, request: Request) -> Program:
    """Decode with a static tree of draft tokens in each target forward; return an `Output`."""
    token, tree = yield from prefill(me, request)
    state, output, layout = None if tree is None else tree.state, Output([token]), me.layout
    accept, began = rule_for([request.sampling], draws=False), me.clock()
    if isinstance(accept, SamplingRule):
        accept.emitted = [1]  # the first token is drawn
    started = 0.0

    def hold() -> None:
        """Hold a drafting step back until its declared time."""
        nonlocal started
        me.wait()
        me.draft_pace.wait(started)
        started = time.perf_counter()

    while not is_done(output.tokens, request):
        output.timesteps += len(layout.groups)
        flow = None
        if me.drafter is not None:
            with me.computing:
                clock, started = me.clock(), time.perf_counter()
                # each step is held where they are paced; native growth is one call
                drafter = me.drafter if me.draft_pace.seconds is None else Counting(me.drafter, hold)
                drafts = me.policy.grow(drafter, state, torch.tensor([token], device=me.device))
                me.wait()
                me.done("C", "dec", 0, output.timesteps, clock)
            flow = Flow(drafts.tokens[0].cpu(), drafts.parents[0].cpu())
            if me.rank != layout.stages[0]:
                yield Send(layout.stages[0], flow)
        found = []
        if me.stage is not None:
            if me.rank == layout.stages[0] and me.drafter is None:
                flow = yield Receive(layout.drafter)
            elif me.rank != layout.stages[0]:
                flow = yield Receive(layout.before(me.rank))
            with me.computing:
                clock, started = me.clock(), time.perf_counter()
                out = me.stage.compute_tree(flow)
                me.wait()
                me.stage_pace.wait(started, len(flow.tokens))
                logits = me.stage.part.logits(out.x)[None] if me.is_last else None  # [1, n, V]
                me.wait()
                me.done("C", "dec", me.node, output.timesteps, clock, [len(flow.tokens)])
                if me.is_last:
                    found = _judge(me.stage, logits, accept, request.depth)
            if not me.is_last:
                yield Send(layout.after(me.rank), out)
        token, count, *rest = yield Broadcast(layout.stages[-1], found)
        path, drafted = rest[:count], rest[request.depth + 1 :][: count - 1]
        for place, emitted in enumerate([*drafted, token]):
            if not is_done(output.tokens, request):
                output.tokens.append(emitted)
                output.hits += place < len(drafted)
                output.judged += place < request.depth
        if is_done(output.tokens, request):
            break
        tapped = yield from collect(me, None if me.stage is None else me.stage.tapped[0, path])
        if me.stage is not None:
            me.stage.commit(path)
        if me.drafter is not None:
            verified = drafts.tokens[:, path]  # [1, m]
            with me.computing:
                counts = torch.tensor([len(path)], device=me.device)
                me.drafter.update(state, verified, tapped[None], counts)
        me.done("V", "finish", me.node, output.timesteps, me.clock())
    output.seconds = me.clock() - began
    return output


def slm(me: Member, request: Request) -> Program:
    """Decode with the small LM alone, at its rank, while all stages idle; return an `Output` whose timesteps
    count its forwards. The text is the small LM's, not the target's."""
    output, began, state = Output([]), me.clock(), None
    *prompt, last = request.tokens
    if me.drafter is not None:
        state = me.drafter.new_state(1, me.room)
        if prompt:
            with me.computing:
                _read(me, state, prompt)
    while not is_done(output.tokens, request):
        output.timesteps += 1
        found = NOTHING
        if me.drafter is not None:
            with me.computing:
                started = time.perf_counter()
                root = TokenTree.root_only(torch.tensor([last], device=me.device))
                logits = me.drafter.expand(state, root, torch.zeros_like(root.tokens))  # [1, 1, V]
                place = torch.tensor([[len(output.tokens)]])
                picked = Sampler([request.sampling]).pick(logits.float(), place)[0]  # [1]
                found = int(me.drafter.to_target(picked))
                if not bool(logits[0, 0, picked].isfinite()):
                    found = NOT_FINITE
                _read(me, state, [last])
                me.draft_pace.wait(started)
        [last] = yield Broadcast(me.layout.drafter, [found])
        if not output.tokens:
            began = me.clock()
        output.tokens.append(last)
    output.timesteps -= 1  # the prompt's is not counted
    output.seconds = me.clock() - began
    return output


def _read(me: Member, state: object, tokens: list[int]) -> None:
    """Append tokens to the state of a drafter that reads tokens alone."""
    read = torch.tensor([tokens]), torch.zeros(1, len(tokens), 0), torch.tensor([len(tokens)])
    me.drafter.update(state, *(one.to(me.device) for one in read))  # [1, m], [1, m, 0], [1]


def _judge(stage: Stage, logits: torch.Tensor, accept: AcceptanceRule, depth: int) -> list[int]:
    """Verify a tree; return the target's token after the accepted path, the path's number of nodes, its
    nodes, and its draft tokens, in one list. Nodes and tokens are padded for a path of `depth` drafts.

    Args:
        logits: of all nodes, [1, n, V].
    """
    tree = stage.tree
    if tree.tokens.device != logits.device:  # a GPU; fields that nobody reads are computed for it
        fields, sizes = [one.to(logits.device) for one in tree.fields()], tree.sizes.to(logits.device)
        tree = TokenTree.of_fields(fields, sizes)
    found = accept(tree, logits.float())
    count, token = int(found.counts), int(found.next_token)
    path = found.path[0, :count].tolist()
    if not bool(logits[0, path[-1], token].isfinite()):
        token = NOT_FINITE
    drafted, room = stage.tree.tokens[0, path[1:]].tolist(), depth + 1
    return [token, count, *path, *[0] * (room - count), *drafted, *[0] * (room - len(drafted))]
