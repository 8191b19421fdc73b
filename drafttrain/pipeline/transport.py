"""Messages between ranks, and a transport that steps all ranks in one process, always in the same order.

A rank's program is a generator: it yields its messages and requests, and is sent the answers. So the same
program runs over `torch.distributed` and, in tests, without it.
"""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from drafttrain.pipeline.stage import Flow


@dataclass
class Send:
    """A command to send a flow to another rank; the sender goes on at once."""

    to: int
    what: Flow | None


@dataclass
class Receive:
    """A command to wait for a message from another rank, which is the answer."""

    source: int


@dataclass
class Broadcast:
    """A command for all ranks together, to send the source's values to all; they are the answer.

    Attributes:
        values: at the source, what is sent; ignored elsewhere.
    """

    source: int
    values: Sequence[int]


Command = Send | Receive | Broadcast
Program = Generator[Command, Any, Any]


def run_locally(programs: Sequence[Program]) -> list[Any]:
    """Run the programs of all ranks alternately in this process, and return their results.

    Raises:
        RuntimeError: all ranks wait for each other.
    """
    mail: dict[tuple[int, int], deque] = {}
    results: dict[int, Any] = {}
    waiting: dict[int, Command] = {}

    def resume(rank: int, answer: Any) -> None:
        try:
            waiting[rank] = programs[rank].send(answer)
        except StopIteration as end:
            results[rank] = end.value
            waiting.pop(rank, None)

    for rank in range(len(programs)):
        resume(rank, None)
    while waiting:
        moved = False
        for rank in sorted(waiting):
            command = waiting[rank]
            if isinstance(command, Send):
                mail.setdefault((rank, command.to), deque()).append(command.what)
                resume(rank, None)
            elif isinstance(command, Receive) and mail.get((command.source, rank)):
                resume(rank, mail[command.source, rank].popleft())
            else:
                continue
            moved = True
        if not moved:
            _meet(waiting, len(programs), resume)
    return [results[rank] for rank in range(len(programs))]


def _meet(waiting: dict[int, Command], n_ranks: int, resume) -> None:
    """Answer a broadcast that all ranks have reached."""
    commands = list(waiting.values())
    sources = {command.source for command in commands if isinstance(command, Broadcast)}
    if len(commands) < n_ranks or not all(isinstance(c, Broadcast) for c in commands) or len(sources) > 1:
        raise RuntimeError(f"ranks: all wait for each other: {waiting}")
    values = list(waiting[sources.pop()].values)
    for rank in sorted(waiting):
        resume(rank, values)
