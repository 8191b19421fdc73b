"""Cut a target by what its ranks measure: blocks for each, so that no stage keeps the others waiting."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from drafttrain.pipeline.distributed import Ranks
from drafttrain.pipeline.measure import WARM_UP, draft_work, stage_work, times
from drafttrain.pipeline.member import Layout, Member, Request

HEADS = 7  # timed forwards of the head


@dataclass(frozen=True)
class Speed:
    """Describe how long a rank takes.

    Attributes:
        block: seconds of one of its blocks.
        beside: seconds of its other work in a timestep: the head, and drafting beside the first stage.
    """

    block: float
    beside: float = 0.0


@torch.no_grad()
def measure_speeds(me: Member, ranks: Ranks, width: int, layers: int, hidden: int) -> dict[int, Speed]:
    """Return the speeds of all ranks with blocks, measured while all work; all ranks call it.

    Args:
        width: nodes of a layer of the tree.
        layers: drafted in a timestep, which pass a stage together; 0: nothing is drafted while stages work.
        hidden: size of the target's states.
    """
    stage, draft = stage_work(me, hidden), draft_work(me, hidden, [width])
    [whole] = times(ranks, stage or draft, [width * max(layers, 1)])
    [step] = times(ranks, draft or stage, [width])
    head = _head(me, hidden) if me.is_last else 0.0
    blocks = len(me.stage.part.blocks) if me.stage else 0
    rows = ranks.gather([whole, head, layers * step if me.drafter else 0.0, blocks])
    return {
        rank: Speed((rows[rank][0] - rows[rank][1]) / rows[rank][3], rows[rank][1] + rows[rank][2])
        for rank in me.layout.stages
    }


def _head(me: Member, hidden: int) -> float:
    """Return the seconds of the token after a state."""
    state, request = torch.randn(hidden, generator=torch.Generator().manual_seed(0)), Request([], 0)
    taken = []
    for _ in range(WARM_UP + HEADS):
        started = time.perf_counter()
        me.pick(state, request, 0)
        taken.append(time.perf_counter() - started)
    return sorted(taken[WARM_UP:])[HEADS // 2]


def share_out(n_blocks: int, layout: Layout, speeds: dict[int, Speed]) -> list[int]:
    """Return blocks for each rank such that the slowest group of stages takes as little time as possible.

    The ranks of a group, which work one after the other, get equally many (one more or less).

    Args:
        n_blocks: of the target, at least one for each rank.
        speeds: by rank.
    """
    sizes = [len(members) for members in layout.groups]  # of each group: blocks so far
    block = [sum(speeds[rank].block for rank in members) / len(members) for members in layout.groups]
    beside = [sum(speeds[rank].beside for rank in members) for members in layout.groups]

    def longer(group: int) -> float:
        return (sizes[group] + 1) * block[group] + beside[group]

    for _ in range(n_blocks - sum(sizes)):  # to the group that it makes the least slow
        sizes[min(range(len(sizes)), key=longer)] += 1
    return [blocks for size, members in zip(sizes, layout.groups) for blocks in _evenly(size, members)]


def _evenly(n: int, members: Sequence[int]) -> list[int]:
    each, more = divmod(n, len(members))
    return [each + (i < more) for i in range(len(members))]
