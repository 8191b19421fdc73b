"""Four processes give what one process gives that steps them all: text, hits and timesteps."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest
import torch

from drafttrain.inference.params import SamplingParams
from drafttrain.pipeline import distributed
from drafttrain.pipeline.check import problems
from drafttrain.pipeline.distributed import Channel
from drafttrain.pipeline.member import Layout, Member, Request, Task
from drafttrain.pipeline.simulate import Link
from drafttrain.pipeline.transport import Broadcast, Receive, run_locally
from drafttrain.trees.chain import ChainPolicy
from tests.pipeline.ranks import BLOCKS, MODES, new_drafters

SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 2}


def test_processes_give_what_one_gives(folders, members, prompts, tmp_path):
    base = {
        "prompt": prompts[0],
        "new": 20,
        "sampling": {},
        "tree": [6, 8, 3, 1],  # width, children, depth, layers
        "groups": [[1], [2], [3]],
        "reads_states": True,  # of the drafter
    }
    jobs = [
        base | {"mode": "pp"},
        base | {"mode": "stpp"},
        base | {"mode": "pipedec"},
        base | {"mode": "pipedec", "groups": [[1, 2], [3]], "sampling": SAMPLED},
        base | {"mode": "stpp", "sampling": SAMPLED, "prompt": prompts[2]},
        base | {"mode": "pipedec", "tree": [1, 1, 3, 1], "prompt": prompts[1]},
        base | {"mode": "pipedec", "tree": [6, 8, 3, 3], "prompt": prompts[2]},
        base | {"mode": "pipedec", "reads_states": False},
        base | {"mode": "pipedec", "reads_states": False, "groups": [[1, 2], [3]], "sampling": SAMPLED},
    ]
    (tmp_path / "jobs.json").write_text(json.dumps(jobs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "4"}
    words = [sys.executable, "-m", "tests.pipeline.ranks", str(folders["llama"]), str(tmp_path / "jobs.json")]
    ranks = [subprocess.Popen(words, env={**os.environ, **place, "RANK": str(rank)}) for rank in range(4)]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0, 0, 0]
    found = json.loads((tmp_path / "results.json").read_text())

    drafters, expected = new_drafters(folders["llama"]), []
    for job in jobs:
        layout = Layout(tuple(tuple(group) for group in job["groups"]))
        reads = job["reads_states"]
        local = members("llama", BLOCKS, drafters[reads], [0, 2] if reads else [], alone=True)
        made = [Member(m.rank, layout, m.stage, m.drafter, ChainPolicy(3), m.taps, m.room) for m in local]
        request = Request(job["prompt"], 20, (), SamplingParams(**job["sampling"]), *job["tree"])
        output = run_locally([MODES[job["mode"]](member, request) for member in made])[0]
        expected.append([output.tokens, output.hits, output.timesteps])
    assert found == expected

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


def test_messages_are_held_back_for_a_declared_link(monkeypatch):
    """Numbers of 8 bytes and states, of 2 in a network, for their size and the latency; a token of a
    broadcast for the latency."""
    size = 8 * 4 + 2 * 2 * 8
    link, slept = Link(gbit=8 * size / 2e9, seconds=3.0, bytes=0), []
    monkeypatch.setattr(distributed.time, "sleep", slept.append)
    sent = time.monotonic_ns()
    messages = [[1, 4, 2, 8, sent], [1, 1, 0, 0, sent]]
    numbers, x = torch.arange(4), torch.zeros(2, 8)
    monkeypatch.setattr(Channel, "_take", lambda self, source: (messages.pop(0), numbers, x))
    channel = Channel(0, 2, 0, link)
    channel.execute(Receive(1))
    channel.execute(Broadcast(1, [], 1))
    assert slept == pytest.approx([3.0 + 2.0, 3.0], abs=1.0)
