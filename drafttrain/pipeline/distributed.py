"""Transport over `torch.distributed`: runs each rank's program in a process, on one machine or several."""

import datetime
import os
import re
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from drafttrain.pipeline.simulate import Link
from drafttrain.pipeline.stage import Flow
from drafttrain.pipeline.transport import Broadcast, Program, Receive, Send
from drafttrain.utils.errors import UserError, brief

# int64 values before a message: whether it has content, count of numbers, rows and width of the states, bytes
# of each of their values, and the time in ns
HEADER = 6
DTYPES = {2: torch.bfloat16, 4: torch.float}  # of states, by bytes per value: native blocks pass on fp32
ROOM = 1 << 18  # bytes of a message that arrive during computation; the rest is received on demand
LOADING = 3600.0  # seconds to wait while other ranks load their weights
JOINING = 5.0  # seconds after the time limit in which torch's own errors arrive
CLOSED, LATE = "the connection was closed", "timed out"
STRANGER = "it does not answer as rank 0; another program may have the port: name another MASTER_PORT"
REASONS = {  # by texts in errors of gloo and torch's store, in lower case
    "send/recv from rank 0": "rank 0 has given up",  # a barrier's, at other ranks
    "another program": STRANGER,
    "ping failed": STRANGER,  # the store's
    "connection closed": CLOSED,
    "connection reset": CLOSED,
    "connection was likely closed": CLOSED,  # the store's
    "broken pipe": CLOSED,
    "timed out": LATE,
    "timeout": LATE,
    "connection refused": "the connection was refused",
}


class LostRank(UserError):
    """The connection to another rank is lost, which is no mistake in a recipe."""


class Channel:
    """Messages of one of the programs that a rank runs at the same time, each in a thread.

    Sends overlap with computing the next layer: a message is kept until it is known to have been received.
    Once a rank has sent a message, a receive for its next one is always posted, so that receiving overlaps
    with computing as well.

    Args:
        tag: of the channel, the same on all ranks.
        link: simulates a slower network, for ranks that share a clock; None: does not.
    """

    def __init__(self, rank: int, world_size: int, tag: int, link: Link | None):
        self.rank, self.world_size, self.tag, self.link = rank, world_size, tag, link
        self.ahead = 2 * (world_size + 4)  # limit of message parts in flight to a rank
        self._sending: dict[int, deque[dist.Work]] = {}  # by destination; each keeps its message
        self._listening: dict[int, tuple[dist.Work, torch.Tensor]] = {}  # by source, with the buffer

    def run(self, program: Program) -> Any:
        """Run a rank's program to its end and return its result.

        Raises:
            LostRank: another rank is gone.
        """
        self._settle(0)  # messages of the previous program have been received by its end
        answer = None
        while True:
            try:
                command = program.send(answer)
            except StopIteration as end:
                return end.value
            answer = self.execute(command)

    def execute(self, command: Send | Receive | Broadcast) -> Any:
        """Carry out one command of a program and return the answer.

        Raises:
            LostRank: another rank is gone.
        """
        if isinstance(command, Send):
            return self._send([command.to], command.what)
        if isinstance(command, Receive):
            return self._receive(command.source)
        if self.rank != command.source:
            header, values, _ = self._take(command.source)
            self._hold(header[-1], self.link and self.link.seconds)
            return values.tolist()
        values = torch.tensor(list(command.values))  # [size]
        self._post([rank for rank in range(self.world_size) if rank != self.rank], 1, values)
        return list(command.values)

    def _send(self, to: Sequence[int], flow: Flow | None) -> None:
        if flow is None:
            self._post(to, 0, torch.zeros(0, dtype=torch.long))
        else:
            self._post(to, 1, torch.cat([flow.tokens, flow.parents]).long(), flow.x)

    def _receive(self, source: int) -> Flow | None:
        (is_there, *_, sent), numbers, x = self._take(source)
        if not is_there:
            return None
        n = len(numbers) // 2
        self._hold(sent, self.link and self.link.message(numbers.nbytes + x.nbytes))
        return Flow(numbers[:n], numbers[n:], x)

    @staticmethod
    def _hold(sent: int, seconds: float | None) -> None:
        """Wait until the declared seconds have passed since a message was sent, at this time in ns."""
        if seconds is not None:
            time.sleep(max(0.0, sent / 1e9 + seconds - time.monotonic()))

    def _post(
        self, to: Sequence[int], is_there: int, numbers: torch.Tensor, x: torch.Tensor | None = None
    ) -> None:
        """Send numbers int64 [n] and states [rows, width] to ranks; bf16 states are sent in bf16, others in
        fp32."""
        x = torch.zeros(0, 0) if x is None else x.cpu()
        x = x if x.dtype in DTYPES.values() else x.float()
        header = torch.tensor([is_there, len(numbers), *x.shape, x.itemsize, time.monotonic_ns()])  # [HEADER]
        message = torch.cat([part.reshape(-1).view(torch.uint8) for part in (header, numbers, x)])
        parts = [part for part in (message[:ROOM], message[ROOM:]) if len(part)]
        for rank in to:
            with lost_ranks(self.rank, f"send to rank {rank}"):
                works = [dist.isend(part, rank, tag=self.tag) for part in parts]
            self._sending.setdefault(rank, deque()).extend(works)
        self._settle(self.ahead)

    def _settle(self, kept: int) -> None:
        """Wait for the oldest message parts to each rank until only `kept` are in flight: gloo notices that
        one has been sent only when it is waited for."""
        for rank, works in self._sending.items():
            with lost_ranks(self.rank, f"send to rank {rank}"):
                while len(works) > kept:
                    works.popleft().wait()

    def _take(self, source: int) -> tuple[list[int], torch.Tensor, torch.Tensor]:
        """Return the header, numbers [n] and states [rows, width] of a rank's next message."""
        with lost_ranks(self.rank, f"hear from rank {source}"):
            if source not in self._listening:
                buffer = torch.empty(ROOM, dtype=torch.uint8)
                self._listening[source] = dist.irecv(buffer, source, tag=self.tag), buffer
            work, buffer = self._listening[source]
            work.wait()
            header = buffer[: 8 * HEADER].view(torch.long).tolist()
            _, n, rows, width, item, _ = header
            size = 8 * (HEADER + n) + item * rows * width
            message = buffer[:size].clone()
            if size > ROOM:
                rest = torch.empty(size - ROOM, dtype=torch.uint8)
                dist.recv(rest, source, tag=self.tag)
                message = torch.cat([message, rest])
            self._listening[source] = dist.irecv(buffer, source, tag=self.tag), buffer
        numbers, x = message[8 * HEADER :].split([8 * n, item * rows * width])
        return header, numbers.view(torch.long), x.view(DTYPES[item]).view(rows, width)

    def finish(self) -> None:
        """Wait until all messages have been received; a last one to each rank ends its listening."""
        self._send(list(self._sending), None)
        for source, (work, _) in self._listening.items():
            with lost_ranks(self.rank, f"hear from rank {source}"):
                work.wait()
        self._settle(0)


class Ranks:
    """Connection of this process to all other ranks.

    Args:
        timeout_s: seconds without an expected message after which a rank counts as lost.
        link: as `Channel` takes it.

    Raises:
        UserError: this process is connected already, or MASTER_PORT is in use.
        LostRank: not all ranks have joined in time.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float, link: Link | None = None):
        self.rank, self.world_size, self.link = rank, world_size, link
        if dist.is_initialized():
            raise UserError(
                "PipelineDecoder: must be the only one in its process, got another that is open or has ended "
                "by an error; close it, or start the program again"
            )
        limit = datetime.timedelta(seconds=timeout_s)
        host, port = (os.environ.get(f"MASTER_{name}") for name in ("ADDR", "PORT"))
        with lost_ranks(rank, f"join the others at {host}:{port}"):
            try:
                store = _store(rank, world_size, limit)
                dist.init_process_group("gloo", None, limit, world_size, rank, store)
                # of its own: in a barrier other ranks than the first wait for as long as the group's limit
                self._loading = dist.new_group(timeout=datetime.timedelta(seconds=LOADING))
            except RuntimeError as error:
                if "EADDRINUSE" not in str(error):
                    raise
                raise UserError(
                    f"MASTER_PORT: must be a free port, got {port}, which is in use; name another, or start "
                    "again"
                ) from error
        self._channels = {0: Channel(rank, world_size, 0, link)}

    def channel(self, tag: int = 0) -> Channel:
        """Return the channel with this tag."""
        if tag not in self._channels:
            self._channels[tag] = Channel(self.rank, self.world_size, tag, self.link)
        return self._channels[tag]

    def meet(self) -> None:
        """Wait for all ranks, longer than for a message: some load more than others."""
        with lost_ranks(self.rank, "meet the others, which load their weights"):
            dist.monitored_barrier(self._loading, datetime.timedelta(seconds=LOADING))

    def agree(self, what: str, fingerprint: str) -> None:
        """Require that all ranks have the same fingerprint (hexadecimal); all of them raise or none does.

        Raises:
            UserError: some rank's fingerprint differs from that of rank 0.
        """
        own = [int(fingerprint[i : i + 8], 16) for i in range(0, len(fingerprint), 8)]  # hexadecimal digits
        first, *others = self.gather(own)
        if differ := ", ".join(str(rank) for rank, one in enumerate(others, 1) if one != first):
            raise UserError(
                f"{what}: must be the same at all ranks, got others at rank {differ} than at rank 0; start "
                "all ranks with the same recipe, files and versions"
            )

    def first(self, numbers: Sequence[int]) -> list[int]:
        """Return the numbers of rank 0; all ranks pass equally many."""
        values = torch.tensor(list(numbers))
        with lost_ranks(self.rank, "hear from rank 0"):
            dist.broadcast(values, 0)
        return values.tolist()

    def total(self, numbers: Sequence[int]) -> list[int]:
        """Return the sum of each number over all ranks."""
        sums = torch.tensor(list(numbers))
        with lost_ranks(self.rank, "add up with the others"):
            dist.all_reduce(sums)
        return sums.tolist()

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of all ranks, by rank; all pass equally many."""
        own = torch.tensor(list(numbers), dtype=torch.double)
        parts = [torch.zeros_like(own) for _ in range(self.world_size)]
        with lost_ranks(self.rank, "hear from all others"):
            dist.all_gather(parts, own)
        return [part.tolist() for part in parts]

    def leave(self) -> None:
        """End the connection of a rank that gives up, while no message of a channel is under way."""
        self._loading = None  # a group that is referred to keeps its connections
        dist.destroy_process_group()

    def close(self) -> None:
        """End the connection once all messages have been received."""
        with lost_ranks(self.rank, "end with the others"):
            for tag in sorted(self._channels):  # threads have made them in any order
                self._channels[tag].finish()
            dist.barrier()
        self._loading = None  # a group that is referred to keeps its connections
        dist.destroy_process_group()


def _store(rank: int, world_size: int, limit: datetime.timedelta) -> dist.Store:
    """Connect to the store at rank 0, in a thread of its own: torch waits without limit for a program that
    takes the connection and never answers.

    Raises:
        TimeoutError: nobody has answered, long after the time limit.
    """
    found: list[dist.Store | Exception] = []

    def connect() -> None:
        try:
            store, *_ = next(rendezvous("env://", rank, world_size, timeout=limit))
            found.append(store)
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=connect, daemon=True)  # it may never end
    thread.start()
    thread.join(limit.total_seconds() + JOINING)
    if not found:
        raise TimeoutError(STRANGER)
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


class lost_ranks:
    """Context in which torch's errors about a lost rank become a `LostRank` of one line.

    Args:
        what: what this rank waits for.
    """

    def __init__(self, rank: int, what: str):
        self.rank, self.what = rank, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        if isinstance(error, RuntimeError | ValueError | TimeoutError) and not isinstance(error, UserError):
            reason = _reason(error)
            remedy = "see what the other ranks say, and start again"
            remedy += ", with a larger timeout_s if they were at work" if reason == LATE else ""
            raise LostRank(
                f"rank {self.rank}: lost a connection while it waited to {self.what} ({reason}); {remedy}"
            ) from error


def _reason(error: BaseException) -> str:
    """Return in few words why a connection was lost."""
    text = str(error).strip() or type(error).__name__
    if absent := re.search(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier", text):
        return f"rank {absent[1]} has not come"
    return next((reason for words, reason in REASONS.items() if words in text.lower()), brief(text, 100))
