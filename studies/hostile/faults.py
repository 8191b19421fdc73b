"""Kills, full disks, short writes, failed renames and syncs at chosen calls of every command that writes.

After each the same command is run again, undisturbed: it must end well and leave what it always leaves. What
is compared is equal in three undisturbed runs (`tests/hostile/results.py`), so no times.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.hostile import results, runner, writers
from tests.hostile.faults import CALLS, OF, arming

KILLS, STRIKES = 5, 6  # calls of each writer that are chosen
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
    status = runner.call(words, log, world, arming(out, fault, number, place / "counts"))
    first, printed = runner.ending(status, log.read_text(errors="replace")), log.read_text(errors="replace")

    def end(verdict: str, why: str = "") -> Struck:
        return Struck(name, fault, number, verdict, why[-600:])

    if fault == "kill" and status == -9:
        first = "killed"
    if first not in ("killed", "refused", "done"):
        return end(first, printed)
    if first == "done" and (why := results.difference(clean.values, results.read(out))):
        return end("half taken", why)
    status = runner.call(words, log, world)
    second = runner.ending(status, log.read_text(errors="replace"))
    if second != "done" and results.difference(clean.values, results.read(out)):
        return end(f"again: {second}", log.read_text(errors="replace"))
    if why := results.difference(clean.values, results.read(out)):
        return end("lost", why)
    if left := [str(path) for path in out.rglob(".*") if path.name.endswith(LEFT)]:
        return end("leftovers", left[0])
    return end("absorbed" if first == "done" else "resumed")


def spaced(last: int, wanted: int) -> list[int]:
    """Return numbers from 1 to `last` at equal distances, the last one among them."""
    return sorted({round(last * (i + 1) / wanted) or 1 for i in range(wanted)}) if last else []


def chosen(clean: Undisturbed, kinds: Sequence[str], wanted: int) -> list[tuple[str, int]]:
    """Return faults of some kinds with the numbers of the calls that they strike."""
    calls = {**clean.calls, "all": sum(clean.calls.values())}
    return [(kind, number) for kind in kinds for number in spaced(calls[OF.get(kind, "all")], wanted)]


def measure(
    place: Path, kinds: Sequence[str], wanted: int, every: int, note: Callable[[Struck], None]
) -> None:
    """Disturb every writer, or one of `every`, by each kind of fault in `wanted` places."""
    world = place / "world"
    for name in list(writers.WRITERS)[::every]:
        own = place / name.replace(" ", "_")
        own.mkdir()
        clean = undisturbed(name, world, own)
        for fault, number in chosen(clean, kinds, wanted):
            case = own / f"{fault}-{number}".replace(" ", "_")
            case.mkdir()
            note(strike(name, fault, number, world, case, clean))
            shutil.rmtree(case)
