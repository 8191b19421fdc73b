"""`scripts/pipeline.py` under torchrun, and `scripts/slow_link.sh`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.run.ranks import RECIPE, free_port, recipe_words

SLOW_LINK = "scripts/slow_link.sh"


@pytest.fixture
def words(tiny_target_folder, tmp_path):
    return [*recipe_words(tiny_target_folder, tmp_path, ["Why?", "Count."]), "--max_new_tokens", "4"]


def require_results(folder: Path) -> None:
    rows = json.loads((folder / "out/results.json").read_text())
    assert [row["prompt"] for row in rows] == ["p0", "p1"] and all(row["token_ids"] for row in rows)


def test_ranks_of_torchrun(words, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--master-port", str(free_port()), "scripts/pipeline.py", "--config", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "mode pp, prompts 2" in done.stdout
    require_results(tmp_path)


@pytest.fixture
def tools(tmp_path):
    """A folder that is the whole PATH: a user by number, ip, and tc where there is one."""

    def make(user=0, tc=True) -> dict[str, str]:
        folder = tmp_path / "bin"
        folder.mkdir()
        programs = {"id": f"case $1 in -u) echo {user};; *) echo somebody;; esac", "ip": "exit 1"}
        programs |= {"tc": "exit 1"} if tc else {}
        for name, text in programs.items():
            (folder / name).write_text(f"#!/bin/bash\n{text}\n")
            (folder / name).chmod(0o755)
        return {"PATH": str(folder)}

    return make


def run_slow_link(*words, env=None):
    return subprocess.run(
        ["/bin/bash", SLOW_LINK, *words], env=env, capture_output=True, text=True, timeout=300
    )


@pytest.mark.skipif(not Path("/bin/bash").exists(), reason="needs bash")
@pytest.mark.parametrize(
    ("given", "user", "tc", "problem"),
    [
        (["1", "0.5"], 0, True, "GBIT MS RECIPE: must be given, got 1 0.5; such as"),
        (["1", "0.5", "no.yaml"], 0, True, "RECIPE: must be a file, got no.yaml"),
        (["fast", "0.5", RECIPE], 0, True, "GBIT and MS: must be numbers, got fast"),
        (["1", "-1", RECIPE], 0, True, "GBIT and MS: must be numbers, got -1"),
        (["1", "0.5", RECIPE], 1000, True, "user: must be root, got somebody; use the recipe's keys"),
        (["1", "0.5", RECIPE], 0, False, "tc: must be installed, got none; install iproute2, or use"),
        (["1", "0.5", RECIPE], 0, True, "network namespaces: must be allowed, got none; use link.gbit"),
    ],
)
def test_mistakes_in_slow_links_are_one_line(tools, given, user, tc, problem):
    done = run_slow_link(*given, env=tools(user, tc))
    [line] = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith(f"slow_link: {problem}")


def test_a_slow_link(words, tmp_path):
    if os.geteuid():
        pytest.skip("network namespaces and tc need root")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    root = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    done = run_slow_link("1", "0.5", *words, env={**os.environ, "PATH": path, "PYTHONPATH": root})
    last = done.stderr.splitlines()[-1] if done.stderr else ""
    if last.startswith("slow_link: "):  # no root's rights, tools or modules here
        assert done.returncode == 2 and done.stderr.splitlines() == [last]
        pytest.skip(last)
    assert done.returncode == 0, done.stderr
    require_results(tmp_path)
