"""Four processes give what one process gives that steps them all: text, hits and timesteps."""

import json
import os
import socket
import subprocess
import sys

from drafttrain.inference.params import SamplingParams
from drafttrain.pipeline.member import Layout, Member, Request
from drafttrain.pipeline.transport import run_locally
from drafttrain.trees.chain import ChainPolicy
from tests.pipeline.ranks import BLOCKS, MODES, new_random_drafter

SAMPLED = {"temperature": 0.8, "top_p": 0.9, "seed": 2}


def test_processes_give_what_one_gives(folders, members, prompts, tmp_path):
    base = {
        "prompt": prompts[0],
        "new": 20,
        "sampling": {},
        "tree": [6, 8, 3, 1],  # width, children, depth, layers
        "groups": [[1], [2], [3]],
    }
    jobs = [
        base | {"mode": "pp"},
        base | {"mode": "stpp"},
        base | {"mode": "pipedec"},
        base | {"mode": "pipedec", "groups": [[1, 2], [3]], "sampling": SAMPLED},
        base | {"mode": "stpp", "sampling": SAMPLED, "prompt": prompts[2]},
        base | {"mode": "pipedec", "tree": [1, 1, 3, 1], "prompt": prompts[1]},
        base | {"mode": "pipedec", "tree": [6, 8, 3, 3], "prompt": prompts[2]},
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

    drafter, expected = new_random_drafter(folders["llama"]), []
    for job in jobs:
        layout = Layout(tuple(tuple(group) for group in job["groups"]))
        local = members("llama", BLOCKS, drafter, [0, 2], alone=True)
        made = [Member(m.rank, layout, m.stage, m.drafter, ChainPolicy(3), m.taps, m.room) for m in local]
        request = Request(job["prompt"], 20, (), SamplingParams(**job["sampling"]), *job["tree"])
        output = run_locally([MODES[job["mode"]](member, request) for member in made])[0]
        expected.append([output.tokens, output.hits, output.timesteps])
    assert found == expected
