"""Four processes give what one process gives that steps them all, and a replay of the text: text, hits and
timesteps."""

import json
import os
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from drafttrain.inference.params import SamplingParams
from drafttrain.pipeline import distributed
from drafttrain.pipeline.check import problems
from drafttrain.pipeline.distributed import Channel, LostRank, lost_ranks
from drafttrain.pipeline.member import Layout, Member, Request, Task
from drafttrain.pipeline.replay import replay
from drafttrain.pipeline.simulate import Link
from drafttrain.pipeline.stage import Flow
from drafttrain.pipeline.transport import Broadcast, Receive, Send, run_locally
from drafttrain.trees.chain import ChainPolicy
from drafttrain.utils.errors import UserError
from tests.pipeline.ranks import BLOCKS, MODES, new_drafters

SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 2}
NEW = 20
SLOW = {"gbit": 1e-3, "seconds": 0.002, "bytes": 0}  # the states of a token here take as long as the latency


def test_processes_give_what_one_gives(folders, members, whole, prompts, tmp_path):
    base = {
        "prompt": prompts[0],
        "new": NEW,
        "sampling": {},
        "tree": [6, 8, 3, 1],  # width, children, depth, layers, whether it is best-first
        "groups": [[1], [2], [3]],
        "reads_states": True,  # of the drafter
        "link": None,
    }
    jobs = [
        base | {"mode": "pp"},
        base | {"mode": "stpp"},
        base | {"mode": "pipedec"},
        base | {"mode": "pipedec", "groups": [[1, 2], [3]], "sampling": SAMPLED},
        base | {"mode": "stpp", "sampling": SAMPLED, "prompt": prompts[2]},
        base | {"mode": "pipedec", "tree": [1, 1, 3, 1], "prompt": prompts[1]},
        base | {"mode": "pipedec", "tree": [6, 8, 3, 3], "prompt": prompts[2]},
        base | {"mode": "pipedec", "tree": [6, 8, 3, 1, True]},
        base | {"mode": "pipedec", "tree": [6, 8, 3, 2, True], "sampling": SAMPLED, "reads_states": False},
        base | {"mode": "pipedec", "reads_states": False},
        base | {"mode": "slm", "reads_states": False, "sampling": SAMPLED},
        base | {"mode": "pipedec", "reads_states": False, "groups": [[1, 2], [3]], "sampling": SAMPLED},
        base | {"mode": "pp", "link": SLOW},
        base | {"mode": "pipedec", "link": SLOW},
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "4"}
    words = [sys.executable, "-m", "tests.pipeline.ranks", str(folders["llama"]), str(tmp_path / "jobs.json")]
    ranks = [subprocess.Popen(words, env={**os.environ, **place, "RANK": str(rank)}) for rank in range(4)]
    assert [rank.wait(timeout=900) for rank in ranks] == [0, 0, 0, 0]
    found = json.loads((tmp_path / "results.json").read_text())

    drafters, expected = new_drafters(folders["llama"]), []
    for job in jobs:
        layout = Layout(tuple(tuple(group) for group in job["groups"]))
        reads = job["reads_states"]
        local = members("llama", BLOCKS, drafters[reads], [0, 2] if reads else [], alone=True)
        made = [Member(m.rank, layout, m.stage, m.drafter, ChainPolicy(3), m.taps, m.room) for m in local]
        request = Request(job["prompt"], NEW, (), SamplingParams(**job["sampling"]), *job["tree"])
        output = run_locally([MODES[job["mode"]](member, request) for member in made])[0]
        expected.append([output.tokens, output.hits, output.timesteps])
    assert found == expected
    for job, result in zip(jobs, found):
        if job["mode"] == "pipedec":
            assert replayed(whole("llama"), drafters, job, result[0]) == result[1:]
    seconds = json.loads((tmp_path / "seconds1.json").read_text())  # of the first stage
    for job, result, spent in zip(jobs, found, seconds):
        assert job["link"] is None or spent > fewest_seconds(job, result[2])

    files = [json.loads((tmp_path / f"logs{rank}.json").read_text()) for rank in range(4)]
    for number, job in enumerate(jobs):
        if job["mode"] != "pipedec":
            continue
        logs = [[Task(*row) for row in file[number]] for file in files]
        groups = [len(group) for group in job["groups"]]
        follows = not job["reads_states"] and len(job["prompt"]) > 1
        assert problems(logs, groups, follows, over_network=True) == []
        tasks = [task for log in logs for task in log]
        assert {task.kind for task in tasks} == {"C", "send", "receive", "V", "own"}
        last = max(task.seq for task in tasks if task[:3] == ("C", "dec", 2))
        early = [[t._replace(start=0.0) if t[1:4] == ("dec", 2, last) else t for t in log] for log in logs]
        assert last > 1 and problems(early, groups, follows, over_network=True)


def replayed(target, drafters, job, text):
    """Return the hits and timesteps of a replay of a job's text."""
    target.tap([0, 2] if job["reads_states"] else [])
    ids = torch.tensor([[*job["prompt"], *text]])
    tapped = target.encode(ids, torch.zeros_like(ids)).tapped[0]
    width, children, _, layers, *best_first = job["tree"]
    known = drafters[job["reads_states"]], job["prompt"], text, tapped, len(job["groups"])
    trace = replay(*known, width, children, layers, best_first=bool(best_first))
    return [trace.hits, len(trace.steps)]


def fewest_seconds(job, timesteps):
    """Return the seconds that the messages of a job with a slow link take at least at the first stage: from
    stage to stage the prompt and each further token, then the broadcast."""
    link, n, hops = Link(**job["link"]), len(job["prompt"]), len(BLOCKS) - 1
    size = 2 * 8 + 64 * 4  # of a token: itself, its parent and its state
    first = hops * link.message(n * size) + link.seconds
    if job["mode"] == "pp":
        return first + (NEW - 1) * (hops * link.message(size) + link.seconds)
    return first + timesteps * link.seconds + (NEW - 1) * link.message(size)  # only the last message waits


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("[Rank 0]: Ranks 1, 3 failed to pass monitoredBarrier in 2000 ms", "rank 1, 3 has not come"),
        ("Rank 2 successfully reached monitoredBarrier, but Send/Recv from rank 0 timed out", "rank 0 has"),
        (
            "[gloo/pair.cc:534] Connection closed by peer [127.0.0.1]:1",
            "the connection was closed",
        ),
        ("Read error: Connection reset by peer", "the connection was closed"),
        ("Failed to recv, got 0 bytes. Connection was likely closed. Did", "the connection was closed"),
        ("Timed out waiting 2000ms for recv operation to complete", "timed out"),
        ("wait timeout after 2000ms, keys: /default_pg/0", "timed out"),
        ("connect error: Connection refused", "the connection was refused"),
        ("something else\nand more", "something else"),
    ],
)
@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_lost_connections_say_why_in_a_line(said, reason, kind):
    with pytest.raises(LostRank) as raised:
        with lost_ranks(2, "hear from rank 1"):
            raise kind(said)
    line = str(raised.value)
    assert line.startswith(f"rank 2: lost a connection while it waited to hear from rank 1 ({reason}")
    ends = "); see what the other ranks say, and start again"
    ends += ", with a larger timeout_s if they were at work" if "(timed out)" in line else ""
    assert line.endswith(ends) and "\n" not in line


def test_loading_has_a_group_with_a_limit_of_its_own(monkeypatch):
    """In a barrier other ranks than the first wait as long as its group's limit, regardless of the call."""
    groups, barriers = [], []
    monkeypatch.setattr(distributed, "_store", lambda *given: None)
    monkeypatch.setattr(distributed.dist, "init_process_group", lambda *given: groups.append(given[2]))
    monkeypatch.setattr(distributed.dist, "new_group", lambda timeout: groups.append(timeout) or "loading")
    monkeypatch.setattr(distributed.dist, "monitored_barrier", lambda *given: barriers.append(given))
    distributed.Ranks(1, 3, 60.0).meet()
    assert [limit.total_seconds() for limit in groups] == [60.0, distributed.LOADING]
    assert barriers == [("loading", groups[1])]


def test_mistakes_are_not_lost_connections():
    for mistake in (UserError("children: must be >= 1"), KeyError("x")):
        with pytest.raises(type(mistake)) as raised:
            with lost_ranks(2, "hear from rank 1"):
                raise mistake
        assert raised.value is mistake


def test_messages_are_held_back_for_a_declared_link(monkeypatch):
    """Numbers of 8 bytes and states for their size and the latency; a token of a broadcast for the
    latency."""
    size = 8 * 4 + 2 * 2 * 8
    link, slept = Link(gbit=8 * size / 2e9, seconds=3.0, bytes=0), []
    monkeypatch.setattr(distributed.time, "sleep", slept.append)
    sent = time.monotonic_ns()
    messages = [[1, 4, 2, 8, 2, sent], [1, 1, 0, 0, 4, sent]]
    numbers, x = torch.arange(4), torch.zeros(2, 8, dtype=torch.bfloat16)
    monkeypatch.setattr(Channel, "_take", lambda self, source: (messages.pop(0), numbers, x))
    channel = Channel(0, 2, 0, link)
    channel.execute(Receive(1))
    channel.execute(Broadcast(1, []))
    assert slept == pytest.approx([3.0 + 2.0, 3.0], abs=1.0)


class Loop:
    """Messages from a rank to itself, in place of `torch.distributed`; a send is known to be gone when it is
    waited for."""

    def __init__(self):
        self.sent, self.waited = [], 0

    def isend(self, part, rank, tag):
        self.sent.append(part)
        return SimpleNamespace(wait=self._wait)

    def _wait(self):
        self.waited += 1

    def irecv(self, buffer, source, tag):
        def wait():
            part = self.sent.pop(0)
            buffer[: len(part)] = part

        return SimpleNamespace(wait=wait)

    def recv(self, buffer, source, tag):
        self.irecv(buffer, source, tag).wait()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float, torch.half])
@pytest.mark.parametrize("rows", [0, 3, 40_000])
def test_states_travel_in_their_dtype(monkeypatch, dtype, rows):
    loop = Loop()
    monkeypatch.setattr(distributed, "dist", loop)
    channel = Channel(0, 1, 0, None)
    tokens, x = torch.arange(rows), torch.randn(rows, 4).to(dtype)
    channel.execute(Send(0, Flow(tokens, tokens - 1, x)))
    size = {torch.bfloat16: 2}.get(dtype, 4) * 4 * rows + 16 * rows
    assert sum(map(len, loop.sent)) == size + 8 * distributed.HEADER
    found = channel.execute(Receive(0))
    assert torch.equal(found.tokens, tokens) and torch.equal(found.parents, tokens - 1)
    assert found.x.dtype == (torch.float if dtype == torch.half else dtype) and torch.equal(
        found.x, x.to(found.x)
    )
    channel.execute(Send(0, None))
    assert channel.execute(Receive(0)) is None


def test_sent_messages_are_not_kept_for_ever(monkeypatch):
    """Few of one program are kept, none of the one before."""
    loop = Loop()
    monkeypatch.setattr(distributed, "dist", loop)
    channel = Channel(0, 3, 0, None)

    def sending(n):
        for i in range(n):
            yield Send(1 + i % 2, Flow(torch.arange(2), torch.arange(2), torch.zeros(2, 4)))
            kept = [len(works) for works in channel._sending.values()]
            assert i + 1 - sum(kept) == loop.waited and max(kept) <= channel.ahead

    channel.run(sending(100))
    assert loop.waited == 100 - 2 * channel.ahead and channel.ahead < 20
    channel.run(iter_once())
    assert loop.waited == 100 and not any(channel._sending.values())


def iter_once():
    """A program that does nothing."""
    return
    yield
