"""Run the command line on hostile input, each case in a fork of this process with a time limit."""

import contextlib
import hashlib
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.hostile.mutations import Mutation

LIMIT = 20.0  # seconds without an end: a hang
RAN = "ran"  # a file that hostile input tries to make


@dataclass(frozen=True)
class Case:
    """A command on a world in which one file is hostile.

    Attributes:
        file: below the world.
        words: of the command line; {world} and {out} are replaced.
    """

    command: str
    file: str
    mutation: Mutation
    words: tuple[str, ...]

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
    case.mutation.apply(copy / case.file)
    before = contents(copy)
    words = [word.format(world=copy, out=out) for word in case.words]
    started = time.monotonic()
    status = call(words, place / "log.txt", copy)
    seconds = time.monotonic() - started
    error = (place / "log.txt").read_text(errors="replace")
    try:
        return Outcome(
            case.name, verdict(case, status, error, copy, before), status, round(seconds, 2), error[-600:]
        )
    finally:
        shutil.rmtree(place, ignore_errors=True)


def call(words: Sequence[str], log: Path, folder: Path) -> int | None:
    """Run a command line in a fork; return its exit status, None where it did not end in time."""
    child = os.fork()
    if not child:
        status = 99
        try:
            with open(log, "w") as file, open(os.devnull) as nothing:
                os.setsid()
                os.dup2(nothing.fileno(), 0)
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
                os.chdir(folder)
                from drafttrain.run.cli import main

                try:
                    status = main(list(words)) or 0
                except SystemExit as end:
                    status = end.code if isinstance(end.code, int) else 1
                except BaseException:
                    traceback.print_exc()
                    status = 1
                sys.stdout.flush()
                sys.stderr.flush()
        finally:
            os._exit(status)
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def verdict(case: Case, status: int | None, error: str, copy: Path, before: dict[str, str]) -> str:
    """Judge how a case has ended."""
    lines = [line for line in error.splitlines() if line.startswith("drafttrain: ")]
    if (copy / RAN).exists():
        return "executed"
    if status is None:
        return "hang"
    if "Traceback (most recent call last)" in error or status not in (0, 1, 2):
        return "traceback"
    if changes(before, contents(copy)):
        return "touched"
    if status == 0:
        return "wrong success" if case.mutation.must_fail else "done"
    return "refused" if status == 2 and len(lines) == 1 else "lines"


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
