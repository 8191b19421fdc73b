"""Messages between ranks, and a transport that steps all ranks in one process, always in the same order.

A rank's program is a generator: it yields its messages and requests, and is sent the answers. So the same
program runs over `torch.distributed` and, without any, in a test.
"""

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from drafttrain.pipeline.stage import Flow


@dataclass
class Send:
    """Give something to another rank; the sender goes on at once."""

    to: int
    what: Flow | None


@dataclass
class Receive:
    """Wait for a message of another rank; the answer is that."""

    source: int


@dataclass
class Broadcast:
    """Wait until all ranks are here; the answer is the values of the source.

    Attributes:
        values: of the source; ignored elsewhere.
        size: how many there are, the same everywhere.
    """

    source: int
    values: Sequence[int]
    size: int = 1


Command = Send | Receive | Broadcast
Program = Generator[Command, Any, Any]


def run_locally(programs: Sequence[Program]) -> list[Any]:
    """Run the programs of all ranks alternately and return their results.

    Raises:
        RuntimeError: all wait for each other.
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
    """Answer a broadcast that all ranks have come to."""
    commands = list(waiting.values())
    sources = {command.source for command in commands if isinstance(command, Broadcast)}
    if len(commands) < n_ranks or not all(isinstance(c, Broadcast) for c in commands) or len(sources) > 1:
        raise RuntimeError(f"ranks: all wait for each other: {waiting}")
    values = list(waiting[sources.pop()].values)
    for rank in sorted(waiting):
        resume(rank, values)
