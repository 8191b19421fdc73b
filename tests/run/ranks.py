"""Ranks of `drafttrain pipeline` in processes of their own, on the tiny recipe."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from drafttrain.run.cli import main

RECIPE = "recipes/tiny/pipeline/smollm2-2.yaml"
COMMAND = [sys.executable, "-m", "drafttrain.run.cli", "pipeline"]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["tests.run.rank_imports"])


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
def started(command: Sequence[str], folder: Path) -> Iterator[subprocess.Popen]:
    """Start a process, whose output goes to 0.out and 0.err; it is ended afterwards."""
    with open(folder / "0.out", "w") as out, open(folder / "0.err", "w") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, preexec_fn=_hear_ctrl_c)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _hear_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # which workers of the suite may ignore


class Rank:
    """A rank of a pipeline in a process of its own, forked from one that has imported what it needs."""

    def __init__(self, number: int, words: Sequence[str], folder: Path, home: Path, place: dict[str, str]):
        self.process = FORKS.Process(target=_rank, args=(number, list(words), folder, home, place))
        self.process.start()

    def ended(self) -> bool:
        return self.process.exitcode is not None

    def wait(self, timeout: float) -> int:
        """Return its exit status, below 0 if a signal has ended it.

        Raises:
            AssertionError: it has not ended in these seconds.
        """
        self.process.join(timeout)
        assert self.ended()
        return self.process.exitcode

    def send(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.process.pid, number)


def _rank(number: int, words: list[str], folder: Path, home: Path, place: dict[str, str]) -> None:
    _hear_ctrl_c()
    os.environ.update(place, RANK=str(number))
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / f"{number}.{name}", os.O_CREAT | os.O_WRONLY), descriptor)
    os.chdir(home)
    sys.exit(main(["pipeline", *words]))


@contextmanager
def started_ranks(
    words: Sequence[Sequence[str]], folder: Path, homes: Sequence[Path] = ()
) -> Iterator[list[Rank]]:
    """Start a rank of a pipeline for each list of words, whose output goes to 0.out, 0.err, 1.out, …; all are
    ended afterwards.

    Args:
        homes: the folders that they work in; by default this one.
    """
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(len(words))}
    ranks: list[Rank] = []
    try:
        for number, (own, home) in enumerate(zip(words, homes or [Path.cwd()] * len(words), strict=True)):
            ranks.append(Rank(number, own, folder, home, place))
        yield ranks
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.join()


def wait_for(is_so: Callable[[], bool], seconds: float) -> None:
    """Wait until something is so.

    Raises:
        AssertionError: it is not so in time.
    """
    limit = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < limit
        time.sleep(0.05)
