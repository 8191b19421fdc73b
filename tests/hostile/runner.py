"""Run the command line on hostile input, each case in a fork of this process with a time limit."""

import contextlib
import hashlib
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.hostile.mutations import Mutation

LIMIT = 60.0  # seconds without an end or a further word: a hang
LONGEST = 300.0  # seconds in all
RAN = "ran"  # a file that hostile input tries to make
SIGNALLED = {130: "interrupted", 143: "terminated"}  # exit status -> word
Begin = Callable[[], Callable[[], None]]


def nothing() -> Callable[[], None]:
    """Do nothing before a command, and nothing after it."""
    return lambda: None


@dataclass(frozen=True)
class Case:
    """A command on a world in which one file is hostile.

    Attributes:
        file: below the world.
        words: of the command line; {world} and {out} are replaced.
        begin: as of `start`.
    """

    command: str
    file: str
    mutation: Mutation
    words: tuple[str, ...]
    begin: Begin = nothing

    @property
    def name(self) -> str:
        return f"{self.command}: {self.file}: {self.mutation.name}"


@dataclass
class Outcome:
    """The end of a case.

    Attributes:
        verdict: "refused" or "done", as it should be, or "traceback", "hang", "wrong success", "lines" (not
            one line), "touched" (foreign files) or "executed".
    """

    case: str
    verdict: str
    status: int | None
    seconds: float
    error: str

    @property
    def is_right(self) -> bool:
        return self.verdict in ("refused", "done")


def run(case: Case, world: Path, place: Path) -> Outcome:
    """Run a case on a copy of the world.

    Args:
        place: a folder for the copy, removed afterwards.
    """
    copy, out = place / "world", place / "out"
    shutil.copytree(world, copy, symlinks=True)
    out.mkdir()
    if case.mutation.content != "same":
        case.mutation.apply(copy / case.file)
    before = contents(copy)
    words = [word.format(world=copy, out=out) for word in case.words]
    started = time.monotonic()
    status = call(words, place / "log.txt", copy, case.begin)
    seconds = time.monotonic() - started
    error = (place / "log.txt").read_text(errors="replace")
    try:
        return Outcome(
            case.name, verdict(case, status, error, copy, before), status, round(seconds, 2), error[-600:]
        )
    finally:
        shutil.rmtree(place, ignore_errors=True)


def call(words: Sequence[str], log: Path, folder: Path, begin: Begin = nothing) -> int | None:
    """Run a command line in a fork; return its exit status (the negative signal that ended it), None where it
    hung."""
    return wait(start(words, log, folder, begin), log)


def start(words: Sequence[str], log: Path, folder: Path, begin: Begin = nothing) -> int:
    """Start a command line in a fork; return the process.

    Args:
        log: file of what it prints.
        folder: where it works.
        begin: called first in the fork; what it returns is called last.
    """
    child = os.fork()
    if not child:
        status = 99
        try:
            with open(log, "w") as file, open(os.devnull) as empty:
                os.setsid()
                # a shell's background job ignores it, and so would this child
                signal.signal(signal.SIGINT, signal.default_int_handler)
                # torch makes a new pool of threads after a fork, which two threads at once may not do
                torch.set_num_threads(torch.get_num_threads())
                os.dup2(empty.fileno(), 0)
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
                os.chdir(folder)
                from drafttrain.run.cli import main

                end = begin()
                try:
                    status = main(list(words)) or 0
                except SystemExit as reason:
                    status = reason.code if isinstance(reason.code, int) else 1
                except BaseException:
                    traceback.print_exc()
                    status = 1
                end()
                sys.stderr.flush()  # first: the other may be a device that is full
                sys.stdout.flush()
        finally:
            os._exit(status)
    return child


def wait(child: int, log: Path) -> int | None:
    """Wait for a process of `start` that prints to `log`; kill it with its children where it hangs."""
    begun = last = time.monotonic()
    size = 0
    while time.monotonic() < min(last + LIMIT, begun + LONGEST):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        if (now := log.stat().st_size if log.exists() else 0) != size:
            last, size = time.monotonic(), now
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def ending(status: int | None, error: str) -> str:
    """Return how a command has ended by its status and what it printed: "done", "refused", "interrupted" (by
    Ctrl-C or SIGTERM), or a failure."""
    lines = [line for line in error.splitlines() if line.startswith("drafttrain: ")]
    if status is None:
        return "hang"
    if "Traceback (most recent call last)" in error or status not in (0, 1, 2, *SIGNALLED):
        return "traceback"
    if status == 0 or (status == 1 and not lines):  # 1: a pipe was closed, or texts differ
        return "done"
    if len(lines) != 1 or status == 1:
        return "lines"
    if status == 2:
        return "refused"
    return "interrupted" if f"drafttrain: {SIGNALLED[status]}; " in lines[0] else "lines"


def verdict(case: Case, status: int | None, error: str, copy: Path, before: dict[str, str]) -> str:
    """Judge how a case has ended."""
    if (copy / RAN).exists() or (copy.parent / RAN).exists():
        return "executed"
    found = ending(status, error)
    if found in ("hang", "traceback"):
        return found
    if changes(before, contents(copy)):
        return "touched"
    return "wrong success" if found == "done" and case.mutation.must_fail else found


def contents(folder: Path) -> dict[str, str]:
    """Return what is in a folder: kinds and hashes by path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink() or not path.is_file():
            found[name] = oct(path.lstat().st_mode)
        else:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def changes(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Return the paths that differ; a command's own folder runs/ may appear."""
    names = sorted(before.keys() | after.keys())
    return [name for name in names if before.get(name) != after.get(name) and not name.startswith("runs")]
