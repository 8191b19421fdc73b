"""Checks that a log of tasks obeys the paper's rules: the dependencies of Appendix B (Algorithm 4, whose
numbers [1] to [12] are in comments), and that no node is in two transfers at once (Appendix A, Algorithms 2
and 3).

The ranks here follow a fixed order in place of the paper's schedulers. One dependency is weaker: after a
token the paper waits until all nodes have synchronized, (V, finish, all, seq). Here, with all ranks in one
process, a node waits until all have computed and it has synchronized itself, as it reads nothing that others
change while they synchronize. Over a network it waits for the last stage, which sends the token, and for its
input, but not for slower nodes. So (V, finish, node, seq) is needed only by the node itself. Where the
drafter is beside a stage, that of the stage is for both; the drafter cuts its tree after it, in the time
of the transfers.

That no node is in two transfers at once is checked only for ranks in one process. Over a network the log of a
send ends when it is posted, and messages arrive while the rank computes, before it asks for them: gloo does
not report when a message has left. The broadcast of a token and the tapped states for the drafter are not
logged, as the paper's rules do not list them.
"""

from collections.abc import Sequence
from itertools import pairwise

from drafttrain.pipeline.member import Task


def problems(
    logs: Sequence[Sequence[Task]],
    groups: Sequence[int],
    follows: bool = False,
    over_network: bool = False,
) -> list[str]:
    """Return the violations in the logs of all ranks for one request, a line each; none for a correct log.

    Args:
        groups: number of stages of each group.
        follows: the tree follows the prompt (ours): until its root has reached the last group nothing is
            verified, and nodes wait only for their own prefill and their input.
        over_network: the ranks are processes: a node waits only for the last stage of the previous timestep,
            and it is not known when transfers end.
    """
    tasks = [task for log in logs for task in log]
    return _Log(tasks, groups, len(groups) if follows else 0, over_network).problems()


class _Log:
    def __init__(self, tasks: Sequence[Task], groups: Sequence[int], beside: int, over_network: bool):
        self.tasks, self.n = tasks, sum(groups)
        self.beside = beside  # first timesteps, which need not wait for all nodes
        self.over_network = over_network
        self.ends = {sum(groups[: i + 1]) for i in range(len(groups))}  # last node of each group
        self.computing = {(task.what, task.node, task.seq): task for task in tasks if task.kind == "C"}
        self.sent = {(task.what, task.seq): task for task in tasks if task.kind == "send"}
        self.received = {(task.what, task.seq): task for task in tasks if task.kind == "receive"}
        self.ended = {(task.node, task.seq): task for task in tasks if task.kind == "V"}
        self.drafter_ends = 0 if any(node == 0 for node, _ in self.ended) else 1  # node of its V tasks
        self.finished: dict[int, float] = {}  # timestep -> when the nodes that others wait for had computed
        for task in tasks:
            if task.kind == "C" and task.what == "dec" and (not over_network or task.node == self.n):
                self.finished[task.seq] = max(self.finished.get(task.seq, task.end), task.end)
        self.has_drafter_transfers = any(source == 0 for source, _ in self.sent)
        self.found: list[str] = []

    def problems(self) -> list[str]:
        if keys := self.sent.keys() ^ self.received.keys():
            self.found.append(
                f"transfers: sent and received must be the same, got one half of {sorted(keys)}"
            )
        for (what, node, seq), task in self.computing.items():
            if what == "pre":  # [1], [2]
                self._needs(task, node > 1 and ("transfer", node - 1, 0))
            elif what == "dec":
                self._decoding(task, node, seq)
            else:  # sync, [9]: the token is known once the last stage has computed
                self._needs(task, ("computing", self.n, seq))
                self._needs_own(task, node, seq, "dec")
        for (node, seq), task in self.ended.items():
            self._needs_own(task, node, seq, "dec")  # [10]
            if node > 0:  # [11]
                self._needs_own(task, node, seq, "sync")
        for (source, seq), task in self.sent.items():
            self._transfer(task, source, seq)
        if not self.over_network:
            self._one_transfer_at_a_time()
        return self.found

    def _decoding(self, task: Task, node: int, seq: int) -> None:
        if seq == 1 or seq <= self.beside:
            self._needs(task, ("computing", node, 0, "pre"))  # [3], of nodes 0 and 1
        if seq == 1 and not self.beside:
            self._needs(task, ("computing", self.n, 0, "pre"))  # [3]: which the last node schedules
        if seq > 1:  # [5], [8], [12]
            self._needs(task, ("ended", node or self.drafter_ends, seq - 1))
            self._needs_own(task, node, seq - 1, "sync")
        if seq > max(self.beside, 1) and (not self.over_network or seq - 1 in self.finished):
            # over a network: else nothing had come to the last stage
            self._after(task, self.finished.get(seq - 1), f"(V, finish, all, {seq - 1})")
        if node == 0:
            return
        if node - 1 in self.ends or node == 1:  # first of its group: sent after the previous timestep
            first = node == 1 and not self.has_drafter_transfers
            self._needs(task, not first and ("transfer", node - 1, seq - 1))
        else:  # [4]
            self._needs(task, ("transfer", node - 1, seq))

    def _transfer(self, task: Task, source: int, seq: int) -> None:
        if (received := self.received.get((source, seq))) is not None and received.end < task.start:
            self.found.append(
                f"(T, {source}, {source + 1}, {seq}): must be received after it is sent, got "
                f"{received.end:.6f} before {task.start:.6f}"
            )
        if source == 0:  # [8], [12]: a layer may be from an earlier timestep, without drafting in this one
            for what in ("dec", "sync"):
                self._needs_own(task, 0, seq, what)
            self._needs(task, seq == 0 and ("computing", 0, 0, "pre"))
            return
        what = "pre" if seq == 0 else "dec"
        self._needs(task, ("computing", source, seq, what))  # [2], [4], [8]
        if source in self.ends:  # [12]: what is left is sent
            self._needs_own(task, source, seq, "sync")

    def _needs_own(self, task: Task, node: int, seq: int, what: str) -> None:
        """Require a task to begin after one of its node, if the node had that one to do."""
        if (what, node, seq) in self.computing:
            self._needs(task, ("computing", node, seq, what))

    def _needs(self, task: Task, need: tuple | bool) -> None:
        if not need:
            return
        kind, node, seq, *what = need
        if kind == "transfer":
            before = self.received.get((node, seq))
            name = f"(T, {node}, {node + 1}, {seq})"
        elif kind == "ended":
            before, name = self.ended.get((node, seq)), f"(V, finish, {node}, {seq})"
        else:
            key = (what[0] if what else "dec", node, seq)
            before, name = self.computing.get(key), f"(C, {', '.join(map(str, key))})"
        self._after(task, None if before is None else before.end, name)

    def _after(self, task: Task, end: float | None, name: str) -> None:
        where = f"({task.kind}, {task.what}, {task.node}, {task.seq})"
        if end is None:
            self.found.append(f"{where}: needs {name}, which is not there")
        elif task.start < end:
            self.found.append(f"{where}: must begin after {name}, got {task.start:.6f} before {end:.6f}")

    def _one_transfer_at_a_time(self) -> None:
        """Report nodes in two transfers at once. A receiver is busy only once the send has begun."""
        taken: dict[int, list[tuple[float, float]]] = {}
        for key, sent in self.sent.items():
            taken.setdefault(sent.what, []).append((sent.start, sent.end))
            if (received := self.received.get(key)) is not None:
                begin = max(sent.start, received.start)
                taken.setdefault(received.node, []).append((begin, received.end))
        for node, spans in taken.items():
            for (_, end), (start, _) in pairwise(sorted(spans)):
                if start < end:
                    self.found.append(
                        f"node {node}: must be in one transfer at a time, got two at {start:.6f}"
                    )
