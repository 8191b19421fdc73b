"""Ranks of `drafttrain pipeline` in processes of their own, on the tiny recipe."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

RECIPE = "recipes/tiny/pipeline/smollm2-2.yaml"
COMMAND = [sys.executable, "-m", "drafttrain.run.cli", "pipeline"]


def recipe_words(target: Path, folder: Path, questions: Sequence[str]) -> list[str]:
    """Return the recipe with a target, and with prompts and results in a folder."""
    prompts = folder / "prompts.jsonl"
    rows = [{"id": f"p{i}", "prompt": text} for i, text in enumerate(questions)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    place = {"--target": target, "--prompts": prompts, "--out": folder / "out"}
    return [RECIPE, *(str(word) for pair in place.items() for word in pair)]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def started(
    commands: Sequence[Sequence[str]], folder: Path, **place: str
) -> Iterator[list[subprocess.Popen]]:
    """Start processes, whose output goes to 0.out, 0.err, 1.out, …; all are ended afterwards.

    Args:
        place: environment variables of all of them.
    """
    processes: list[subprocess.Popen] = []
    try:
        for i, command in enumerate(commands):
            with open(folder / f"{i}.out", "w") as out, open(folder / f"{i}.err", "w") as err:
                env = {**os.environ, **place, "RANK": str(i)} if place else None
                processes.append(
                    subprocess.Popen(command, env=env, stdout=out, stderr=err, preexec_fn=_hear_ctrl_c)
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _hear_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which workers of the suite may ignore


def started_ranks(words: Sequence[str], n: int, folder: Path):
    """Start n ranks of a pipeline as `started`, without a process that starts them."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(n)}
    return started([[*COMMAND, *words]] * n, folder, **place)


def wait_for(is_so: Callable[[], bool], seconds: float) -> None:
    """Wait until something is so.

    Raises:
        AssertionError: it is not so in time.
    """
    limit = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.05)
