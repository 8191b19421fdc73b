"""A rank of a pipeline, its place in the layout, and the requests, outputs and tasks of a run."""

import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from drafttrain.inference.params import SamplingParams
from drafttrain.inference.sampling import Sampler
from drafttrain.inference.session import NOT_FINITE
from drafttrain.pipeline.config import PaceConfig
from drafttrain.pipeline.stage import Stage
from drafttrain.trees.costs import CostCurve
from drafttrain.trees.drafter import Drafter
from drafttrain.trees.interface import TreePolicy

CPU = torch.device("cpu")


def own_device(name: str) -> torch.device:
    """Return the device of this process: of a machine's GPUs, one by one, that of its local rank; ranks share
    them if there are more ranks than GPUs."""
    if name == "cpu" or not torch.cuda.is_available():
        return CPU
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK") or 0) % torch.cuda.device_count())


@dataclass(frozen=True)
class Layout:
    """Assignment of ranks to groups of stages and to the drafter.

    Attributes:
        groups: ranks that work on one layer of the tree, one after the other, from the first blocks to the
            last; every rank is in one group, but for a drafter that is alone.
        drafter: rank that drafts, alone or together with a stage.
    """

    groups: tuple[tuple[int, ...], ...]
    drafter: int = 0

    @property
    def stages(self) -> list[int]:
        """Return the ranks with blocks, in order."""
        return [rank for group in self.groups for rank in group]

    def before(self, rank: int) -> int | None:
        """Return the rank of the stage before this one, None for the first."""
        place = self.stages.index(rank)
        return self.stages[place - 1] if place else None

    def after(self, rank: int) -> int | None:
        """Return the rank of the stage after this one, None for the last."""
        place = self.stages.index(rank) + 1
        return self.stages[place] if place < len(self.stages) else None

    def begins(self, rank: int) -> bool:
        """Return whether this rank is the first of its group."""
        return any(group[0] == rank for group in self.groups)

    def ends(self, rank: int) -> bool:
        """Return whether this rank is the last of its group."""
        return any(group[-1] == rank for group in self.groups)


@dataclass
class Request:
    """A prompt to decode, with its limits and the sizes of trees.

    Attributes:
        tokens: of the prompt.
        max_new_tokens: limit of the output.
        stop: tokens that end it.
        sampling: how tokens are drawn.
        width, children: nodes per layer of the prediction tree, and candidates per node.
        depth: maximum depth of a static tree.
        layers: that the prediction tree grows by in a timestep.
        best_first: whether it grows by the nodes that save most timesteps instead (ours).
    """

    tokens: Sequence[int]
    max_new_tokens: int
    stop: Collection[int] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    width: int = 4
    children: int = 4
    depth: int = 5
    layers: int = 1
    best_first: bool = False


@dataclass
class Output:
    """The result of a request, as a rank has it.

    Attributes:
        tokens: emitted.
        judged: how many of them could be hits: not the first one, unless the tree follows the prompt, nor in
            mode pipedec the last one, nor in mode stpp one after the deepest layer.
        hits: how many of these were in the tree when they left the last stage.
        timesteps: number of timesteps after the prompt has left the last stage.
        seconds: of decoding after the prompt and the first token.
    """

    tokens: list[int]
    judged: int = 0
    hits: int = 0
    timesteps: int = 0
    seconds: float = field(default=0.0, compare=False)


@dataclass
class Pace:
    """Declared times of a device's work, which simulate a slower device than this machine.

    Attributes:
        seconds: declared seconds of a piece of work by its tokens; None: as long as it takes here.
        held, late: number of paced pieces of work, and how many took longer than declared.
    """

    seconds: Callable[[int], float] | None = None
    held: int = 0
    late: int = 0

    @classmethod
    def of_stages(cls, config: PaceConfig) -> "Pace":
        """Return the pace of a stage."""
        if config.curve is not None:
            sizes, times = zip(*config.curve)
            return cls(CostCurve(sizes, [ms / 1e3 for ms in times]))
        return cls(_always(config.stage_ms))

    @classmethod
    def of_drafts(cls, config: PaceConfig) -> "Pace":
        """Return the pace of a drafting step."""
        return cls(_always(config.draft_ms))

    def wait(self, started: float, tokens: int = 1) -> None:
        """Sleep until the declared time of a piece of work over `tokens` has passed since `started`."""
        if self.seconds is None:
            return
        left = started + (declared := self.seconds(tokens)) - time.perf_counter()
        if declared:  # what takes no time cannot be late
            self.held, self.late = self.held + 1, self.late + (left < 0)
        if left > 0:
            time.sleep(left)


def _always(ms: float | None) -> Callable[[int], float] | None:
    return None if ms is None else lambda tokens: ms / 1e3


class Task(NamedTuple):
    """A logged task of a rank, as the paper's tuples (Appendix B) with times: computing (C, type,
    node, timestep), the sending or the receiving half of a transfer (T, source, destination, timestep), or
    the end of a timestep (V, finish, node, timestep). The drafter is node 0, the i-th stage node i.

    Attributes:
        kind: "C", "send", "receive" or "V"; "own" for what the paper does not list.
        what: "pre", "dec" or "sync" of C, "finish" of V, "grow" or "pick" of own; the source of a transfer.
        node: of C and V, and the destination of a transfer.
        seq: the timestep; 0 is the prompt's.
        start, end: seconds.
        nodes: of the tree that "dec" of C runs: a stage at once, the drafter in each step, in mode pipedec.
    """

    kind: str
    what: str | int
    node: int
    seq: int
    start: float
    end: float
    nodes: tuple[int, ...] = ()


@dataclass
class Member:
    """A rank: its blocks, its drafter, or both.

    Attributes:
        stage_pace, draft_pace: declared times of its stage and of a draft step.
        log: tasks of the last request: all in mode pipedec, those of the prompt, computing and the ends of
            rounds in stpp, those of the prompt and computing in pp.
        clock: seconds, the same for all ranks of a machine.
        computing: lock held during computing, which members of several requests share.
        policy: how static trees grow, for `stpp`.
        taps: blocks whose states the drafter reads, each with the rank that holds it.
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
    computing: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def twin(self) -> "Member":
        """Return a member for another request at the same time, with the same weights, paces and lock."""
        stage = None if self.stage is None else Stage(self.stage.part, self.stage.room)
        return replace(self, stage=stage, log=[])

    @property
    def node(self) -> int:
        """Return the number of its stage, from 1 on; 0 without a stage."""
        return 0 if self.stage is None else self.layout.stages.index(self.rank) + 1

    @property
    def device(self) -> torch.device:
        """Return the device of its stage, or without one of its drafter. What ranks send each other, and the
        tree of a stage, are on the CPU."""
        own = self.drafter if self.stage is None else self.stage.part
        return getattr(own, "device", CPU)

    def wait(self) -> None:
        """Wait until the device has computed what it was given, so that times are those of the work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def done(
        self, kind: str, what: str | int, node: int, seq: int, start: float, nodes: Sequence[int] = ()
    ) -> None:
        """Log a task that ends now."""
        self.log.append(Task(kind, what, node, seq, start, self.clock(), tuple(nodes)))

    @property
    def tap_ranks(self) -> list[int]:
        """Return the ranks that send states to the drafter, in the order of their blocks."""
        return sorted({rank for _, rank in self.taps}, key=self.layout.stages.index)

    @property
    def is_last(self) -> bool:
        """Return whether it has the last blocks and the head."""
        return self.rank == self.layout.stages[-1]

    def pick(self, state: torch.Tensor, request: Request, position: int) -> int:
        """Return the target's token after a state [H] at a position of the output; NOT_FINITE if its logit is
        NaN or infinite."""
        logits = self.stage.part.logits(state[None])[None]  # [1, 1, V]
        place = torch.tensor([[position]])
        token = int(Sampler([request.sampling]).pick(logits.float(), place))
        return token if bool(logits[0, 0, token].isfinite()) else NOT_FINITE
