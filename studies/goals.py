"""Figures with goals, those of `studies/figures`: measure them by group, judge, print and record them."""

import contextlib
import json
import operator
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from drafttrain.evaluation.metrics import Measurement
from drafttrain.kernels.machine import describe_machine
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json
from drafttrain.utils.machine import OtherLoad, check_quiet
from drafttrain.utils.provenance import git_commit
from drafttrain.utils.writing import write_json, write_text

RAW = Path("runs/figures")
COMMITTED = Path("docs/figures")  # <topic>.jsonl of a full run, for quick runs in a fresh clone
MEASURED = "%Y-%m-%dT%H:%M:%S%z"
HISTORY = COMMITTED / "history"  # the same of earlier definitions or too little measuring; never ok
COMPARE = {"<=": operator.le, ">=": operator.ge, "==": operator.eq, ">": operator.gt}

CPU = torch.device("cpu")
BEGUN = "begun.json"  # in a folder of raw measurements: when, at which commit and on which machine they began
MISSING = {"value": None, "error": "not measured"}
# figure -> {"value": ...} and notes. Of these `judge` reads "ok": False overrules the goal, "size": what was
# measured, "interval": 95 % of the value or the range of seeds, "flags": why not to take it at its word.
Measured = dict[str, dict[str, Any]]


@dataclass
class Run:
    """How to measure.

    Attributes:
        topic: of the figures.
        quick: few prompts, and recorded values for what takes long.
        resume: go on with the raw measurements of an interrupted run.
        busy: "refuse" or "warn" when other processes would spoil timings.
        limit: prompts of each task at most, but for quick runs; None for as many as the figure is defined
            with.
        vllm_python: interpreter of an environment with vLLM, which is a baseline.
        more_prompts: files of further tasks by name, which may not be redistributed.
        oanc: the archive of OANC's written part.
        pair: a larger target and a small LM that drafts for it, for topic seed.
        target: a second target, for topic flagship.
        only: names of the wanted figures, for groups that measure each at its own cost; empty for all.
        resumed: where and when the raw measurements were begun that this run has gone on with.
    """

    topic: str
    quick: bool = False
    resume: bool = False
    busy: str = "refuse"
    limit: int | None = None
    vllm_python: str | None = None
    more_prompts: dict[str, str] = field(default_factory=dict)
    oanc: str | None = None
    pair: list[str] | None = None
    target: str | None = None
    only: Collection[str] = ()
    resumed: list[dict[str, Any]] = field(default_factory=list)

    def prompts(self, quick: int, full: int | None) -> int | None:
        """Return how many prompts of a task to take; None for all."""
        if self.quick:
            return quick
        return full if self.limit is None else min(self.limit, full or self.limit)

    def folder(self, name: str, **settings: Any) -> Path:
        """Return the folder for a group's raw data, emptied unless the run is resumed.

        Args:
            settings: that the raw data depend on and do not record themselves.

        Raises:
            UserError: the run to resume had other settings.
        """
        place = self._place(name)
        if place.exists() and not self.resume:
            shutil.rmtree(place)
        return self._open(name, settings, begin=True)

    def folder_of(self, name: str, **settings: Any) -> Path:
        """Return the folder of raw data that other figures share, with what is in it.

        Args:
            settings: as for `folder`, and then it is begun if there is none; none of them for a folder that
                only its own figures begin.

        Raises:
            UserError: it was begun with other settings.
        """
        return self._open(name, settings, begin=bool(settings))

    def _open(self, name: str, settings: dict[str, Any], begin: bool) -> Path:
        """Return a folder; note in `resumed` when and at which commit what is in it was begun."""
        folder = self._place(name)
        begun = folder / BEGUN
        if begun.exists():
            known = read_json(begun)
            before = known.get("settings", settings)
            if settings and before != settings:
                remedy = "measure its figures again without --resume"
                raise UserError(f"{folder}: was begun with {before}, got {settings}; {remedy}")
            self.resumed.append({"folder": name, **known})
        elif folder.exists() and any(folder.iterdir()):  # from before this was noted
            self.resumed.append({"folder": name, "commit": None})
        elif begin:
            folder.mkdir(parents=True, exist_ok=True)
            write_json(begun, {**stamp(), "machine": describe_machine(CPU), "settings": settings})
        return folder

    def _place(self, name: str) -> Path:
        """Return where raw data go: those of shortened runs apart, so that they replace nothing."""
        return RAW / ("quick" if self.quick else "full" if self.limit is None else "limited") / name

    @property
    def quick_note(self) -> dict[str, Any]:
        """Return the notes that leave a figure undecided whose quick run does less than the figure is."""
        return {"ok": None, "why": "measured by a quick run, which does less"} if self.quick else {}

    def check_quiet(self) -> None:
        if warning := check_quiet(refuse=self.busy == "refuse"):
            print(f"timings will be poor: {warning}", file=sys.stderr)


@dataclass(frozen=True)
class Size:
    """How much a figure must be measured on, or was measured on.

    Attributes:
        prompts: by task; chat turns where a task has several.
        repeats: of each timed measurement.
        seeds: of each training.
    """

    prompts: dict[str, int] = field(default_factory=dict)
    repeats: int = 1
    seeds: int = 1

    def shortfalls(self, measured: "Size") -> list[str]:
        """List what a measurement lacks of this size."""
        pairs = [(f"prompts of {task}", measured.prompts.get(task, 0), n) for task, n in self.prompts.items()]
        pairs += [("repeats", measured.repeats, self.repeats), ("seeds", measured.seeds, self.seeds)]
        return [f"{found} of {wanted} {what}" for what, found, wanted in pairs if found < wanted]


def size_of(measurements: Sequence[Measurement]) -> dict[str, Any]:
    """Count prompts by task, and repeats, for the note "size" of a figure."""
    prompts = {(one.task, one.prompt) for one in measurements}
    tasks = sorted({task for task, _ in prompts})
    return {
        "prompts": {name: sum(task == name for task, _ in prompts) for name in tasks},
        "repeats": 1 + max(one.repeat for one in measurements),
    }


# what issues ask of figures that compare speeds or counts: all first turns of MT-bench, some of the others
FIRST_TURNS = {"mt_bench": 80}
AT_LEAST = 20


@dataclass(frozen=True)
class Group:
    """Figures that are measured together.

    Attributes:
        goals: figure -> goal, such as ">= 1.15".
        measure: measures them.
        long: too long for --quick, which takes recorded values.
        size: what each figure must be measured on to be ok or not; smaller ones are left undecided.
        sizes: the same for figures whose value is that of one of several targets, by the note "target".
        floors: figure -> what the lower end of its interval must reach, for goals of at least 1; 1 if left
            out.
    """

    goals: dict[str, str]
    measure: Callable[[Run], Measured]
    long: bool = False
    size: Size = field(default_factory=Size)
    sizes: dict[str, Size] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)

    def asked_size(self, measured: Mapping[str, Any]) -> Size:
        """Return what a figure must be measured on."""
        return self.sizes.get(measured.get("target"), self.size)

    def floor(self, figure: str) -> float:
        """Return what the lower end of a figure's interval must reach."""
        return self.floors.get(figure, 1.0)


def run_and_watch(
    command: Sequence[str], cwd: Path, environment: dict[str, str], log: Path
) -> tuple[int, float, int]:
    """Run a command with its output in a file; return exit status, seconds and peak memory in bytes.

    Memory is the sum over all its processes, looked at twice a second (shared pages count in each), or the
    peak of the largest process where that is more; 0 where there is no /proc.
    """
    peak, started = 0, time.monotonic()
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command, cwd=cwd, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            while process.poll() is None:
                peak = max(peak, session_memory(process.pid))
                time.sleep(0.5)
        finally:
            if process.poll() is None:  # Ctrl-C: nothing of it may live on
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return process.returncode, time.monotonic() - started, peak


def session_memory(session: int) -> int:
    """Return the resident bytes of all processes of a session, or the peak of one of them if that is more.

    Not `getrusage`: a child's peak there includes what its parent held when it was forked.
    """
    total = largest = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if os.getsid(int(status.parent.name)) == session:
                sizes = dict(line.split(":", 1) for line in status.read_text().splitlines())
                resident, peak = (int(sizes.get(name, "0 kB").split()[0]) for name in ("VmRSS", "VmHWM"))
                total, largest = total + resident, max(largest, peak)
    return 1024 * max(total, largest)


def reaches(goal: str, value: float | None) -> bool:
    """Return True if a value reaches a goal such as ">= 1.15"."""
    sign, number = goal.split()
    return value is not None and COMPARE[sign](value, float(number))


def judge(
    goal: str, measured: dict[str, Any], size: Size, floor: float = 1.0
) -> tuple[bool | None, str | None]:
    """Decide whether a measurement reaches a goal, and why it does not.

    A goal of at least 1 claims to be ahead of something: there the lower end of the interval must reach
    `floor` as well, and a goal "> 1" needs an interval.

    Returns:
        True, False, or None where the measurement cannot decide; and the reason unless it is True.
    """
    value, interval = measured["value"], measured.get("interval")
    sign, number = goal.split()
    if "skipped" in measured or measured.get("ok", True) is None:
        return None, measured.get("skipped") or measured.get("why")
    if value is None:
        return False, measured.get("error")
    missed, doubts = [], list(measured.get("flags") or [])
    if not reaches(goal, value):
        missed.append("the goal is missed")
    if measured.get("ok") is False:
        missed.append(measured.get("why") or "a condition of its own is not met")
    if interval and sign in (">", ">=") and float(number) >= 1 and not COMPARE[sign](interval[0], floor):
        missed.append(f"the interval begins at {interval[0]:.4g}")
    if not interval and sign == ">" and float(number) == 1:
        doubts.append("no interval")
    short = size.shortfalls(Size(**measured.get("size", {})))
    if short:
        doubts.insert(0, f"measured on {', '.join(short)}")
    if missed and not short:
        return False, "; ".join(missed)
    return (None, "; ".join(doubts + missed)) if doubts else (True, None)


def recorded(topic: str) -> dict[str, dict[str, Any]]:
    """Return the figures of the last full run by name: the newer of this clone's and the committed one; where
    there is neither, of a shortened run or else of `HISTORY`."""
    found: dict[str, dict[str, Any]] = {}
    for folder in (COMMITTED, RAW):
        for name, row in read_rows(folder / f"{topic}.jsonl").items():
            if name not in found or precedence(row) >= precedence(found[name]):
                found[name] = row
    return read_rows(HISTORY / f"{topic}.jsonl") | found


def precedence(row: dict[str, Any]) -> tuple[bool, datetime]:
    """Return the sort key of a figure's records: a full run's is preferred to a shortened one's, then the
    newest one."""
    return "limit" not in row, measured_at(row)


def measured_at(row: dict[str, Any]) -> datetime:
    """Return when a row was measured, as `stamp` notes it; without such a note it is the oldest."""
    try:
        return datetime.strptime(row.get("measured", ""), MEASURED)
    except ValueError:
        return datetime.min.replace(tzinfo=UTC)


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """Return the rows of a file of figures by name; none if it does not exist."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {row["figure"]: row for row in map(json.loads, lines)}


def measure_group(group: Group, run: Run) -> Measured:
    """Return a group's figures; those that cannot be measured have value None and a note."""
    if run.quick and group.long:
        records = recorded(run.topic)
        missing = {"value": None, "error": "no full run is recorded; run without --quick"}
        return {
            name: {**records[name], "recorded": records[name].get("measured")} if name in records else missing
            for name in group.goals
        }
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return group.measure(run)
    except Exception as error:  # one figure that fails must not cost the others
        if not isinstance(error, UserError):
            traceback.print_exc()
        text = " ".join(str(error).split())
        return {name: {"value": None, "error": text, "failed": True} for name in group.goals}


def figure_row(
    name: str, goal: str, measured: dict[str, Any], size: Size, floor: float = 1.0
) -> dict[str, Any]:
    """Return one line of output; "ok" is None where nothing is decided, for the reason under "why"."""
    ok, why = judge(goal, measured, size, floor)
    own = ("figure", "value", "goal", "ok", "why")
    notes = {key: item for key, item in measured.items() if key not in own}
    said = {"why": why} if why and why not in (measured.get("error"), measured.get("skipped")) else {}
    return rounded({"figure": name, "value": measured["value"], "goal": goal, "ok": ok, **said, **notes})


def falls_short(row: dict[str, Any]) -> bool:
    """Return True for a row that misses its goal, decided or not; what was skipped does not."""
    return row["ok"] is False or (row["value"] is not None and not reaches(row["goal"], row["value"]))


def rounded(value: Any) -> Any:
    """Return the same with floats to 4 digits after the point."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value


def record(topic: str, rows: Sequence[dict[str, Any]]) -> None:
    """Write figures in place of earlier ones of the same name; not those that were skipped or ended in an
    exception, nor those of a shortened run (with `limit`) where there is one of a full run."""
    path = RAW / f"{topic}.jsonl"
    kept = read_rows(path)
    for row in rows:
        is_shorter = "limit" in row and "limit" not in kept.get(row["figure"], row)
        if not ({"failed", "skipped"} & row.keys() or is_shorter):
            kept[row["figure"]] = row
    write_text(path, "".join(json.dumps(row) + "\n" for row in kept.values()))


def stamp() -> dict[str, Any]:
    """Return the time and the commit."""
    return {"measured": time.strftime(MEASURED), "commit": git_commit()}


def measure_topic(groups: Sequence[Group], run: Run, only: Collection[str] = ()) -> bool:
    """Measure a topic's figures and print one JSON object for each; a full run is recorded.

    "ok" is null for what was measured on less than the figure's size asks, as in most quick runs.

    Args:
        only: names of the wanted figures; empty for all.

    Returns:
        False if a figure falls short or is missing.
    """
    all_ok = True
    for group in groups:
        wanted = [name for name in group.goals if not only or name in only]
        if not wanted:
            continue
        load, run.resumed, run.only = OtherLoad(), [], only
        measured = measure_group(group, run)
        machine = rounded({**describe_machine(CPU), "load": load.lap()})
        rows = []
        for name in wanted:
            found = measured.get(name, MISSING)
            rows.append(
                figure_row(name, group.goals[name], found, group.asked_size(found), group.floor(name))
            )
            print(json.dumps(rows[-1]), flush=True)
        all_ok &= not any(map(falls_short, rows))
        if not run.quick:  # at once: later groups may take hours
            notes = {} if run.limit is None else {"limit": run.limit}
            notes |= stamp() | ({"resumed": run.resumed} if run.resumed else {})
            # a group that measures in another process, or knows the dtype, says so itself
            stamped = [{**row, "machine": {**machine, **row.get("machine", {})}, **notes} for row in rows]
            record(run.topic, stamped)
    return all_ok
