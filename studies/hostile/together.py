"""Every command that writes, twice at once, and each into the folder of each stage of a run that works there.

One of two may be refused in one line. Afterwards the command is run once more, and must leave what it leaves
undisturbed.
"""

import itertools
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from studies.hostile.faults import undisturbed
from studies.hostile.share import Share
from tests.hostile import results, runner, writers

DELAYS = (0.0, 0.1, 0.3)  # seconds between two starts


@dataclass
class Pair:
    """Two commands at once.

    Attributes:
        verdict: "right", or "corrupt", or how one of them failed.
    """

    first: str
    second: str
    verdict: str
    why: str = ""

    @property
    def is_right(self) -> bool:
        return self.verdict == "right"


def into(name: str, stage: str, world: Path, out: Path) -> list[str] | None:
    """Return a writer's words with the folder of a stage in place of its own; None: it names none."""
    words = writers.words(name, world, out)
    if "--out" not in words:
        return None
    at = words.index("--out") + 1
    folder, own = out / "run" / writers.STAGES[stage], Path(words[at])
    words[at] = str(folder / own.name if own.suffix else folder)
    return words


def both(first: list[str], second: list[str], world: Path, place: Path, delay: float) -> list[str]:
    """Start two commands; return how they have ended."""
    logs = [place / "first.txt", place / "second.txt"]
    begun = runner.start(first, logs[0], world)
    time.sleep(delay)
    other = runner.start(second, logs[1], world)
    statuses = [runner.wait(process, log) for process, log in zip((begun, other), logs)]
    return [runner.ending(status, log.read_text(errors="replace")) for status, log in zip(statuses, logs)]


def race(name: str, other: str | None, world: Path, place: Path, clean: results.Values, delay: float) -> Pair:
    """Run a writer beside itself, or a stage of a run beside a writer into its folder.

    Args:
        name: the writer whose result is judged; with `other`, a stage's.
        other: None: itself.
    """
    out = place / "out"
    writers.prepare(name, world, out)
    words = writers.words(name, world, out)
    second = words if other is None else into(other, name.removeprefix("run --only "), world, out)
    endings = both(words, second, world, place, delay)

    def end(verdict: str, why: str = "") -> Pair:
        return Pair(name, other or name, verdict, why[-600:])

    printed = "".join((place / log).read_text(errors="replace") for log in ("first.txt", "second.txt"))
    if wrong := [one for one in endings if one not in ("done", "refused")]:
        return end(wrong[0], printed)
    if "done" not in endings:
        return end("both refused", printed)
    status = runner.call(words, place / "again.txt", world)
    again = runner.ending(status, (place / "again.txt").read_text(errors="replace"))
    why = results.difference(clean, results.read(out))
    if again not in ("done", "refused") or (again == "refused" and why):  # refused: it was there already
        return end(f"again: {again}", (place / "again.txt").read_text(errors="replace"))
    if why:
        return end("corrupt", why)
    return end("right")


def pairs(world: Path, place: Path) -> list[tuple[str, str | None]]:
    """Return all pairs: each writer beside itself, and each stage beside the writers that take a folder."""
    found: list[tuple[str, str | None]] = []
    for name in writers.WRITERS:
        stage = name.removeprefix("run --only ")
        found.append((name, None))
        if stage in writers.STAGES:
            found += [(name, other) for other in writers.WRITERS if into(other, stage, world, place)]
    return found


def measure(place: Path, share: Share, note: Callable[[Pair], None]) -> None:
    """Race pairs; a process of several takes all of a writer's."""
    world, names = place / "world", share.dealt(writers.WRITERS)
    for name, own in itertools.groupby(Share(share.every).of(pairs(world, place)), lambda pair: pair[0]):
        if name not in names:
            continue
        folder = place / f"pairs {name}".replace(" ", "_")
        folder.mkdir()
        clean = undisturbed(name, world, folder).values
        for i, (_, other) in enumerate(own):
            case = folder / str(i)
            case.mkdir()
            note(race(name, other, world, case, clean, DELAYS[i % len(DELAYS)]))
            shutil.rmtree(case)
