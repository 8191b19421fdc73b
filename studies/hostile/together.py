"""Every command that writes, twice at once, and each into the folder of each stage of a run that works there.

One of two may be refused in one line. Afterwards the command is run once more, and must leave what it leaves
undisturbed.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from studies.hostile.faults import undisturbed
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
    statuses = [runner.wait(process, runner.LIMIT) for process in (begun, other)]
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
    if again != "done" and results.difference(clean, results.read(out)):
        return end(f"again: {again}", (place / "again.txt").read_text(errors="replace"))
    if why := results.difference(clean, results.read(out)):
        return end("corrupt", why)
    return end("right")


def measure(place: Path, every: int, note: Callable[[Pair], None]) -> None:
    """Race all pairs, or one of `every`."""
    world, number = place / "world", 0
    for name in writers.WRITERS:
        stage = name.removeprefix("run --only ")
        others = [None]
        if stage in writers.STAGES:
            others += [one for one in writers.WRITERS if into(one, stage, world, place)]
        chosen = [one for i, one in enumerate(others, number) if i % every == 0]
        number += len(others)
        if not chosen:
            continue
        own = place / f"pairs {name}".replace(" ", "_")
        own.mkdir()
        clean = undisturbed(name, world, own).values
        for i, other in enumerate(chosen):
            case = own / str(i)
            case.mkdir()
            note(race(name, other, world, case, clean, DELAYS[i % len(DELAYS)]))
            shutil.rmtree(case)
