"""Balancing of a pipeline: blocks for each rank by measured speeds, so that no stage delays the others."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafttrain.pipeline.distributed import Ranks
from drafttrain.pipeline.measure import Work, draft_work, stage_work, times
from drafttrain.pipeline.member import Layout, Member, Pace, Request

WORTH = 1.03  # speed-up of the slowest group from which a new split of blocks is worth loading


@dataclass(frozen=True)
class Speed:
    """Measured times of a rank.

    Attributes:
        block: seconds per block.
        beside: seconds of its other work in a timestep: the head, and drafting on the first stage's rank.
    """

    block: float
    beside: float = 0.0


@torch.no_grad()
def measure_speeds(me: Member, ranks: Ranks, width: int, layers: int, hidden: int) -> dict[int, Speed]:
    """Measure the speeds of all ranks with blocks while all of them work; all ranks must call it.

    Args:
        width: nodes per layer of the tree.
        layers: drafted per timestep, which pass a stage together; 0: nothing is drafted while stages work.
        hidden: size of the target's states.
    """
    nodes = width * max(layers, 1)
    stage, draft = stage_work(me, hidden, sizes=[nodes]), draft_work(me, hidden, [width])
    [whole] = times(ranks, stage or draft, [nodes])
    [head] = times(ranks, _head_work(me, hidden) or stage or draft, [nodes])
    [step] = times(ranks, draft or stage, [width])
    blocks = len(me.stage.part.blocks) if me.stage else 0
    rows = ranks.gather([whole, head * me.is_last, layers * step if me.drafter else 0.0, blocks])
    # without the pieces of work that were held back here
    me.stage_pace, me.draft_pace = Pace(me.stage_pace.seconds), Pace(me.draft_pace.seconds)
    return {rank: _speed(*rows[rank]) for rank in me.layout.stages}


def _speed(whole: float, head: float, drafting: float, blocks: float) -> Speed:
    """Return a rank's speed. The head is timed separately, so that noise could leave nothing for blocks."""
    return Speed(max(whole - head, whole / 10) / blocks, head + drafting)


def _head_work(me: Member, hidden: int) -> Work | None:
    """Return the work of the last stage's head, picking the token after a state; None at other ranks."""
    if not me.is_last:
        return None
    state = torch.randn(hidden, generator=torch.Generator().manual_seed(0)).to(me.device)  # [H]
    request = Request([], 0)
    if me.stage.part.native is None:
        state = state.to(me.stage.part.dtype)
    return Work(lambda: None, lambda size: None, lambda size: me.pick(state, request, 0))


def share_out(before: Sequence[int], layout: Layout, speeds: dict[int, Speed]) -> list[int]:
    """Return blocks for each rank such that the slowest group of stages takes as little time as possible.

    The ranks of a group, which work one after the other, get equally many (one more or less).

    Args:
        before: current blocks of each rank, which are kept if a new split would gain less than `WORTH`.
        speeds: by rank.
    """
    found = _fastest(sum(before), layout, speeds)
    worth = slowest(before, layout, speeds) > WORTH * slowest(found, layout, speeds)
    return found if worth else list(before)


def slowest(blocks: Sequence[int], layout: Layout, speeds: dict[int, Speed]) -> float:
    """Return the seconds per timestep of the slowest group."""
    numbers = dict(zip(layout.stages, blocks, strict=True))
    return max(
        sum(numbers[rank] * speeds[rank].block + speeds[rank].beside for rank in members)
        for members in layout.groups
    )


def _fastest(n_blocks: int, layout: Layout, speeds: dict[int, Speed]) -> list[int]:
    sizes = [len(members) for members in layout.groups]  # of each group: blocks so far
    block = [sum(speeds[rank].block for rank in members) / len(members) for members in layout.groups]
    beside = [sum(speeds[rank].beside for rank in members) for members in layout.groups]

    def longer(group: int) -> float:
        return (sizes[group] + 1) * block[group] + beside[group]

    for _ in range(n_blocks - sum(sizes)):  # to the group that is fastest with one more
        sizes[min(range(len(sizes)), key=longer)] += 1
    return [blocks for size, members in zip(sizes, layout.groups) for blocks in _evenly(size, members)]


def _evenly(n: int, members: Sequence[int]) -> list[int]:
    each, more = divmod(n, len(members))
    return [each + (i < more) for i in range(len(members))]
