"""Signals, full disks, short writes, failed renames and syncs at chosen calls of every command that writes.

After each the same command is run again, undisturbed: it must end well and leave what it always leaves. What
is compared is equal in three undisturbed runs (`tests/hostile/results.py`), so no times.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from studies.hostile.share import Share
from tests.hostile import results, runner, terminal, writers
from tests.hostile.faults import CALLS, OF, arming

KILLS, STRIKES, SIGNALS = 5, 6, 2  # calls of each writer that are chosen
ENDS = {"kill": -9, "interrupt": 130, "terminate": 143}  # what a signal has to end with
ON_A_TERMINAL = ("interrupt", "terminate", "full disk")  # with its progress bars
UNDISTURBED = 3
LEFT = (".tmp", ".old", ".partial")  # of names that nobody should find afterwards


@dataclass
class Struck:
    """A command that was disturbed.

    Attributes:
        verdict: "resumed" or "absorbed" (the fault did no harm), as it should be; "lost" (the second run does
            not leave what it should), "half taken" (the first ended well and did not leave it), "leftovers",
            or how the first or second run failed (see `runner.ending`).
        why: what shows it.
    """

    writer: str
    fault: str
    number: int
    verdict: str
    why: str = ""

    @property
    def is_right(self) -> bool:
        return self.verdict in ("resumed", "absorbed")


@dataclass
class Undisturbed:
    """The result of a writer, and its calls by name."""

    values: results.Values
    calls: dict[str, int]


def undisturbed(name: str, world: Path, place: Path) -> Undisturbed:
    """Run a writer without faults.

    Raises:
        RuntimeError: it does not end well.
    """
    runs, counts = [], place / "counts"
    for i in range(UNDISTURBED):
        out = place / f"{i}"
        writers.prepare(name, world, out)
        log = place / "log.txt"
        status = runner.call(writers.words(name, world, out), log, world, arming(out, None, 0, counts))
        if status != 0:
            raise RuntimeError(f"{name}: must end with 0, got {status}: {log.read_text()[-2000:]}")
        runs.append(results.read(out))
        shutil.rmtree(out)
    numbers = dict(zip(CALLS, map(int, counts.read_text().split())))
    return Undisturbed(results.stable(runs), numbers)


def strike(name: str, fault: str, number: int, world: Path, place: Path, clean: Undisturbed) -> Struck:
    """Disturb a writer once and run it again."""
    out, log = place / "out", place / "log.txt"
    writers.prepare(name, world, out)
    words = writers.words(name, world, out)
    arm = arming(out, fault, number, place / "counts")
    status = runner.call(words, log, world, on_a_terminal(arm) if fault in ON_A_TERMINAL else arm)
    printed = log.read_bytes().decode(errors="replace")  # a terminal needs the carriage returns
    shown = terminal.screen(printed) if fault in ON_A_TERMINAL else printed.splitlines()
    first = runner.ending(status, "\n".join(shown))

    def end(verdict: str, why: str = "") -> Struck:
        return Struck(name, fault, number, verdict, why[-600:])

    if any(map(terminal.is_spoiled, shown)):
        return end("lines", printed)
    if fault in ENDS and status == ENDS[fault]:
        first = "ended"
    elif fault in ENDS:  # ignored, or not as it has to end
        return end(f"{fault}: {first}", printed)
    if first not in ("ended", "refused", "done"):
        return end(first, printed)
    if first == "done" and (why := results.difference(clean.values, results.read(out))):
        return end("half taken", why)
    status = runner.call(words, log, world)
    second = runner.ending(status, log.read_text(errors="replace"))
    why = results.difference(clean.values, results.read(out))
    if second not in ("done", "refused") or (second == "refused" and why):  # refused: it was there already
        return end(f"again: {second}", log.read_text(errors="replace"))
    if why:
        return end("lost", why)
    if left := [str(path) for path in out.rglob(".*") if path.name.endswith(LEFT)]:
        return end("leftovers", left[0])
    return end("absorbed" if first == "done" else "resumed")


def on_a_terminal(begin: runner.Begin) -> runner.Begin:
    """Return what a case calls first, with a terminal attached."""

    def attached() -> Callable[[], None]:
        ends = terminal.attach(), begin()
        return lambda: [end() for end in ends] and None

    return attached


def spaced(last: int, wanted: int) -> list[int]:
    """Return numbers from 1 to `last` at equal distances, the last one among them."""
    return sorted({round(last * (i + 1) / wanted) or 1 for i in range(wanted)}) if last else []


def chosen(clean: Undisturbed, kinds: Sequence[str], wanted: int) -> list[tuple[str, int]]:
    """Return faults of some kinds with the numbers of the calls that they strike."""
    calls = {**clean.calls, "all": sum(clean.calls.values())}
    return [(kind, number) for kind in kinds for number in spaced(calls[OF.get(kind, "all")], wanted)]


def measure(
    kinds: Sequence[str], wanted: int, place: Path, share: Share, note: Callable[[Struck], None]
) -> None:
    """Disturb writers by each kind of fault in `wanted` places."""
    world = place / "world"
    for name in share.of(writers.WRITERS):
        own = place / name.replace(" ", "_")
        own.mkdir()
        clean = undisturbed(name, world, own)
        for fault, number in chosen(clean, kinds, wanted):
            case = own / f"{fault}-{number}".replace(" ", "_")
            case.mkdir()
            note(strike(name, fault, number, world, case, clean))
            shutil.rmtree(case)
