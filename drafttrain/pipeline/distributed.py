"""Programs of ranks over `torch.distributed`: every rank is a process, on one machine or several."""

import datetime
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from drafttrain.pipeline.simulate import Link
from drafttrain.pipeline.stage import Flow
from drafttrain.pipeline.transport import Broadcast, Program, Receive, Send
from drafttrain.utils.errors import UserError

HEADER = 5  # numbers before a message: whether there is one, its nodes, the shape of its states, its time


class Ranks:
    """This process's connection to the others.

    Sends go on while the next layer is computed: a message is kept until it has been taken.

    Args:
        timeout_s: seconds after which a rank that is not heard of counts as lost.
        link: of a slower network in place of this machine's, for ranks that share a clock; None: none.
    """

    def __init__(self, rank: int, world_size: int, timeout_s: float, link: Link | None = None):
        self.rank, self.link = rank, link
        self._pending: list[tuple[dist.Work, torch.Tensor]] = []
        limit = datetime.timedelta(seconds=timeout_s)
        with lost_ranks(rank, "join"):
            dist.init_process_group("gloo", "env://", limit, world_size, rank)

    def run(self, program: Program) -> Any:
        """Run a rank's program to its end and return its result.

        Raises:
            UserError: another rank is gone.
        """
        answer = None
        while True:
            try:
                command = program.send(answer)
            except StopIteration as end:
                return end.value
            with lost_ranks(self.rank, _whom(command)):
                answer = self._execute(command)

    def agree(self, what: str, fingerprint: str) -> None:
        """Compare something with what rank 0 has.

        Raises:
            UserError: it differs.
        """
        own = [int(fingerprint[i : i + 8], 16) for i in range(0, len(fingerprint), 8)]  # hexadecimal digits
        with lost_ranks(self.rank, "hear from rank 0"):
            other = self._execute(Broadcast(0, own, len(own)))
        if own != other:
            raise UserError(
                f"rank {self.rank}: {what}: must be those of rank 0, got others; start all ranks with the "
                "same recipe, files and versions"
            )

    def total(self, numbers: Sequence[int]) -> list[int]:
        """Return the sums over all ranks."""
        sums = torch.tensor(list(numbers))
        with lost_ranks(self.rank, "add up"):
            dist.all_reduce(sums)
        return sums.tolist()

    def _execute(self, command: Send | Receive | Broadcast) -> Any:
        if isinstance(command, Send):
            return self._send(command.to, command.what)
        if isinstance(command, Receive):
            return self._receive(command.source)
        values = list(command.values) if self.rank == command.source else [0] * command.size
        said = torch.tensor(values)  # [size]
        dist.broadcast(said, command.source)
        return said.tolist()

    def _send(self, to: int, flow: Flow | None) -> None:
        self._pending = [(work, kept) for work, kept in self._pending if not work.is_completed()]
        header = torch.zeros(HEADER, dtype=torch.long)
        parts = [header]
        if flow is not None:
            rows, width = (0, 0) if flow.x is None else flow.x.shape
            header[:] = torch.tensor([1, len(flow.tokens), rows, width, time.monotonic_ns()])
            if len(flow.tokens):
                parts.append(torch.stack([flow.tokens, flow.parents]))  # [2, m]
            if rows and width:
                parts.append(flow.x.float().contiguous())  # [rows, width]
        self._pending += [(dist.isend(part, to), part) for part in parts]

    def _receive(self, source: int) -> Flow | None:
        header = torch.zeros(HEADER, dtype=torch.long)
        dist.recv(header, source)
        there, n, rows, width, sent = header.tolist()
        if not there:
            return None
        nodes, x = torch.zeros(2, n, dtype=torch.long), torch.zeros(rows, width)
        if n:
            dist.recv(nodes, source)
        if rows and width:
            dist.recv(x, source)
        if self.link is not None:
            time.sleep(max(0.0, sent / 1e9 + self.link(max(n, rows)) - time.monotonic()))
        return Flow(nodes[0], nodes[1], x)

    def close(self) -> None:
        """End the connection once everything sent has been taken."""
        with lost_ranks(self.rank, "end"):
            for work, _ in self._pending:
                work.wait()
            dist.barrier()
        dist.destroy_process_group()


class lost_ranks:
    """Turn what torch raises when a rank is gone into one line.

    Args:
        what: what this rank waits for.
    """

    def __init__(self, rank: int, what: str):
        self.rank, self.what = rank, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind, error: BaseException | None, trace) -> None:
        if isinstance(error, RuntimeError | ValueError) and not isinstance(error, UserError):
            reason = (str(error).strip() or kind.__name__).splitlines()[0]
            raise UserError(
                f"rank {self.rank}: lost a connection while it waited to {self.what} ({reason[:200]}); see "
                "what the other ranks say, and start again"
            ) from error


def _whom(command: Send | Receive | Broadcast) -> str:
    if isinstance(command, Send):
        return f"send to rank {command.to}"
    return f"hear from rank {command.source}"
