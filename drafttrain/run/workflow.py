"""Run the stages of a recipe in order and skip what is up to date.

Each stage writes one folder below the run's output folder. `stage.json` is written into it last: a folder
without one is not done. It records what the folder was made from (the recipe's section and the contents of
all inputs), so a stage runs again exactly when one of these has changed, and the hashes of its files, so that
damaged ones are made again. What stages do is defined elsewhere, in `drafttrain/run/stages.py`.
"""

import contextlib
import dataclasses
import gc
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console
from rich.markup import escape

from drafttrain.run.made_from import as_json, differences, plain
from drafttrain.utils.disk import disk_problem
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint, read_json
from drafttrain.utils.provenance import (
    HASHES,
    LOCK,
    RECORD,
    Hashes,
    content_hash,
    content_hashes,
    git_commit,
    read_record,
    versions,
)
from drafttrain.utils.writing import write_json

STARTED = ".started"  # <output>/.started/<folder>.json: what an unfinished folder is being made from
PREVIOUS = "previous"  # <output>/previous/<folder>-<n>: outdated folders and damaged files that are kept


@dataclass(frozen=True)
class Stage:
    """One step of a run.

    Attributes:
        name: its name on the command line.
        folder: of its output, below the run's output folder.
        run: `run(recipe, folders, out)` does the work; `folders` has the folder of every stage in `needs`.
            The figures it returns, if any (a dict or dataclass), go into `stage.json`.
        section: the settings its output depends on, as a dict of the recipe's sections.
        settle: `settle(recipe, begun)` returns the recipe with each "auto" in a field marked `settled`
            replaced by the value in `begun`, the section of an unfinished attempt, or the best here.
        needs: stages whose folders it reads, if the recipe enables them.
        uses: `uses(recipe, name)` returns whether the recipe needs the stage `name` of these.
        files: files and folders of the user's that it reads.
        enabled: whether the recipe asks for it.
        resumes: whether it continues an unfinished folder; otherwise such a folder is removed first.
        keep: whether an outdated folder is moved to `previous/` instead of removed.
        shared: whether a folder that a sibling run has made from the same inputs is copied.
        appends: whether it may append to files of a finished folder, so that a copy must not be hard links.
        ranks: whether several processes (deepspeed, torchrun) may run it together.
        summary: names of the figures that go into the run's `summary.json`.
        show: prints the result in a folder when the stage is skipped.
        described_in: files of its folder that say how it was made; later stages do not depend on them.
    """

    name: str
    folder: str
    run: Callable[[Any, dict[str, Path], Path], Any]
    section: Callable[[Any], Any]
    settle: Callable[[Any, dict[str, Any]], Any] = lambda recipe, begun: recipe
    needs: Sequence[str] = ()
    uses: Callable[[Any, str], bool] = lambda recipe, stage: True
    files: Callable[[Any], Sequence[str]] = lambda recipe: ()
    enabled: Callable[[Any], bool] = lambda recipe: True
    resumes: bool = False
    keep: bool = False
    shared: bool = False
    appends: bool = False
    ranks: bool = False
    summary: Sequence[str] = ()
    show: Callable[[Path], None] = lambda folder: None
    described_in: Sequence[str] = ()


@dataclass(frozen=True)
class Decision:
    """Decision about a stage: `action` is skip, run, resume, share or off; `why` gives the reason.

    Attributes:
        twin: the folder of another run to copy.
        damaged: files of the finished folder that are missing or have changed since they were written.
    """

    stage: Stage
    action: str
    why: str
    made_from: dict[str, Any] = field(default_factory=dict)
    twin: Path | None = None
    damaged: Sequence[str] = ()


class Workflow:
    """The stages of one recipe over one output folder.

    Args:
        again: names of stages that run even where they are up to date.

    Raises:
        UserError: one of these is no stage.
    """

    def __init__(
        self, recipe: Any, stages: Sequence[Stage], console: Console | None = None, again: Sequence[str] = ()
    ):
        self.recipe, self.stages = recipe, list(stages)
        self.again = {self._stage(name).name for name in again}
        self.output = Path(recipe.output)
        # With several ranks (deepspeed, torchrun) each runs the stage, but only the first writes records.
        self.is_first_rank = int(os.environ.get("RANK") or 0) == 0
        self.console = console or Console(quiet=not self.is_first_rank)
        self.hashes = Hashes(self.output / HASHES)

    def folder(self, name: str) -> Path:
        """Return the folder of a stage.

        Raises:
            UserError: no stage has this name.
        """
        return self.output / self._stage(name).folder

    def folders(self, stage: Stage) -> dict[str, Path]:
        """Return the folders that a stage reads, by the stages that write them."""
        used = (self._stage(name) for name in stage.needs if stage.uses(self.recipe, name))
        return {need.name: self.output / need.folder for need in used if need.enabled(self.recipe)}

    def run(self, first: str | None = None, last: str | None = None, only: str | None = None) -> None:
        """Run the selected stages: all, those from `first` to `last`, or `only` one; others are left alone.

        Raises:
            UserError: a stage refuses its input, an input is missing, or another process works in the folder.
        """
        selected = self.select(first, last, only)
        try:
            with self._lock():
                self._warn_of_outdated(selected if self.is_first_rank else ())  # which hashes what is stored
                for before, stage in zip([None, *selected], selected):
                    if before is not None and before.enabled(self.recipe) and not self.is_first_rank:
                        from drafttrain.run.ranks import wait_for_file

                        wait_for_file(self.output / before.folder / RECORD)
                    self._run_if_needed(stage)
                if self.is_first_rank:
                    self.hashes.save()
            self._write_summary()
        except Exception as error:
            if isinstance(error, UserError) or (problem := disk_problem(error, self.output)) is None:
                raise
            raise UserError(problem) from error

    def _run_if_needed(self, stage: Stage) -> None:
        decision = self.decide(stage, remade=())
        if decision.action == "skip":
            self._say("green", stage, "skip", decision.why)
            stage.show(self.output / stage.folder)
        elif decision.action == "share":
            self._share(decision)
        elif decision.action != "off":
            self._execute(decision)

    def decide(self, stage: Stage, remade: Sequence[str] | set[str]) -> Decision:
        """Decide what to do about a stage, from what its folder was made from and what it would be now.

        Args:
            remade: earlier stages that would run again first, so that their contents are not known yet.

        Raises:
            UserError: an input does not exist.
        """
        if not stage.enabled(self.recipe):
            return Decision(stage, "off", "the recipe does not ask for it")
        folder = self.output / stage.folder
        record = read_record(folder)
        if waiting := [name for name in self.folders(stage) if name in remade]:
            if record is None:
                return Decision(stage, "run", "not made yet")
            return Decision(stage, "run", f"{', '.join(waiting)} will be made again")
        made_from = self._made_from(stage)
        again = stage.name in self.again
        if again and record is not None:  # what such a command began goes on, as other interrupted stages do
            return Decision(stage, "run", "asked for again", made_from)
        if record is not None:
            changes = self._changes(stage, record["made_from"], made_from)
            if not changes:
                if damaged := self._damaged(folder, record):
                    action, why = "resume" if stage.resumes else "run", f"damaged: {damaged[0]}"
                    why += f" and {len(damaged) - 1} more" if damaged[1:] else ""
                    return Decision(stage, action, why, made_from, damaged=damaged)
                return Decision(stage, "skip", "up to date", made_from)
        if not again and (twin := self._twin(stage, made_from)):
            return Decision(stage, "share", f"{twin} was made from the same", made_from, twin)
        if record is not None:
            return Decision(stage, "run", "; ".join(changes), made_from)
        if not folder.exists():
            return Decision(stage, "run", "not made yet", made_from)
        begun = self._begun(stage)["made_from"] if self._marker(stage).exists() else made_from
        changes = self._changes(stage, begun, made_from)
        if stage.resumes and not changes and self._marker(stage).exists():
            return Decision(stage, "resume", "was interrupted", made_from)
        return Decision(stage, "run", "; ".join(["was interrupted", *changes]), made_from)

    def _execute(self, decision: Decision) -> None:
        stage, marker = decision.stage, self._marker(decision.stage)
        if int(os.environ.get("WORLD_SIZE") or 1) > 1 and not stage.ranks:
            raise UserError(
                f"{stage.name}: must run in one process, got several; run it before you launch them"
            )
        folders = self.folders(stage)
        spent, begun = 0.0, {}
        if decision.damaged and stage.resumes and self.is_first_rank:
            self._set_aside(decision)
        if decision.action == "resume" and self.is_first_rank:
            from drafttrain.run.copies import seconds_killed

            spent = self._begun(stage)["wall_seconds"] + seconds_killed(self.output / stage.folder, marker)
            begun = self._begun(stage)["made_from"]["section"]
        elif self.is_first_rank:
            self._clear(stage)
        if not self.is_first_rank:
            from drafttrain.run.ranks import wait_for

            begun = wait_for(marker, lambda: self._noted(decision))
        recipe = stage.settle(self.recipe, begun)
        section = as_json(plain(stage.section(recipe)))
        decision = dataclasses.replace(decision, made_from={**decision.made_from, "section": section})
        note = {"made_from": decision.made_from, "wall_seconds": spent}
        if self.is_first_rank:
            write_json(marker, note)
            self.hashes.save()  # of its inputs, should it be interrupted
        self._say("cyan", stage, decision.action, decision.why)
        begun = time.monotonic()
        try:
            figures = stage.run(recipe, folders, self.output / stage.folder)
        except BaseException as error:
            spent += time.monotonic() - begun
            if self.is_first_rank:
                write_json(marker, {**note, "wall_seconds": spent})
            what = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
            self._say("red", stage, what, f"after {_seconds(spent)}")
            raise
        spent += time.monotonic() - begun
        if self.is_first_rank:
            self._finish(decision, figures, spent)
        self._say("green", stage, "done", _seconds(spent))
        gc.collect()  # a stage's models go before the next one loads its own

    def _twin(self, stage: Stage, made_from: dict[str, Any]) -> Path | None:
        """Return a finished folder that a sibling run has made from the same inputs, or None."""
        if not stage.shared or int(os.environ.get("WORLD_SIZE") or 1) > 1:
            return None
        from drafttrain.run.copies import find_twin

        def is_same(record: dict[str, Any]) -> bool:
            return not self._changes(stage, record["made_from"], made_from)

        return find_twin(self.output, stage.folder, is_same, self._damaged)

    def _share(self, decision: Decision) -> None:
        """Copy another run's folder."""
        stage, folder = decision.stage, self.output / decision.stage.folder
        self._say("cyan", stage, "share", decision.why)
        from drafttrain.run.copies import share_folder

        self._clear(stage)
        spent = share_folder(decision.twin, folder, links=not stage.appends)
        self._marker(stage).unlink(missing_ok=True)
        self._say("green", stage, "done", _seconds(spent))

    def _noted(self, decision: Decision) -> dict[str, Any] | None:
        """Return the settings that the first rank has settled for all; None until the folder is cleared."""
        noted = self._begun(decision.stage)["made_from"]
        return None if self._changes(decision.stage, noted, decision.made_from) else noted["section"]

    def _warn_of_outdated(self, selected: Sequence[Stage]) -> None:
        """Warn if a selected stage reads a folder that the current recipe would make differently."""
        read = {name for stage in selected for name in self.folders(stage)}
        for stage in self.stages:
            if stage.name in read and stage not in selected and read_record(self.output / stage.folder):
                with contextlib.suppress(UserError):
                    decision = self.decide(stage, remade=())
                    if decision.action != "skip":
                        self._say("yellow", stage, "stale", f"used unchanged, but {decision.why}")

    def _finish(self, decision: Decision, figures: Any, spent: float) -> None:
        stage, folder = decision.stage, self.output / decision.stage.folder
        folder.mkdir(parents=True, exist_ok=True)
        if dataclasses.is_dataclass(figures):
            figures = dataclasses.asdict(figures)
        files = content_hashes(folder, self.hashes)
        record = {
            "stage": stage.name,
            "fingerprint": fingerprint(decision.made_from),
            "made_from": decision.made_from,
            "output": fingerprint({name: files[name] for name in files if name not in stage.described_in}),
            "files": files,
            "seed": self.recipe.seed,
            "versions": versions(),
            "git_commit": git_commit(),
            "wall_seconds": round(spent, 3),
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "figures": figures if isinstance(figures, dict) else {},
        }
        write_json(folder / RECORD, record)
        self._marker(stage).unlink(missing_ok=True)
        self.hashes.save()

    def _clear(self, stage: Stage) -> None:
        """Remove a stage's outdated folder, or set it aside if it took hours or may hold the user's files."""
        for leftover in self.output.glob(f".{stage.folder}.*"):  # of `new_folder`, after a kill
            leftover.unlink() if leftover.is_symlink() else shutil.rmtree(leftover)
        folder = self.output / stage.folder
        if not folder.exists():
            return
        is_ours = (folder / RECORD).exists() or self._marker(stage).exists() or not any(folder.iterdir())
        from drafttrain.run.copies import holds_others, keep

        if stage.keep or not is_ours or holds_others(folder, self.hashes):  # somebody's files, perhaps
            kept = keep(folder, self.output / PREVIOUS)
            self._say("yellow", stage, "kept", f"the former {folder} is now {kept}")
            return
        gone = self.output / f".{stage.folder}.old"  # renamed first: half removed, it must not pass for whole
        os.replace(folder, gone)
        gone.unlink() if gone.is_symlink() else shutil.rmtree(gone)

    def _damaged(self, folder: Path, record: dict[str, Any]) -> list[str]:
        """Return the files of a finished folder that are missing or changed, except checkpoints, which are no
        longer needed. A folder of an earlier version has no hashes, so none are found."""
        found, written = content_hashes(folder, self.hashes), record.get("files", {})
        needed = {name: content for name, content in written.items() if not name.startswith("checkpoints/")}
        return [name for name, content in needed.items() if found.get(name) != content]

    def _set_aside(self, decision: Decision) -> None:
        """Mark a finished folder as unfinished and move its damaged files to `previous/`."""
        from drafttrain.run.copies import set_aside

        stage, folder = decision.stage, self.output / decision.stage.folder
        for name, kept in set_aside(folder, decision.damaged, self.output / PREVIOUS, self._marker(stage)):
            self._say("yellow", stage, "kept", f"the damaged {folder / name} is now {kept}")

    def _begun(self, stage: Stage) -> dict[str, Any]:
        """Return the note of an unfinished folder: what it is being made from, and the seconds spent.

        Raises:
            UserError: the note is damaged.
        """
        match note := read_json(self._marker(stage)):
            case {"made_from": {"section": dict(), "inputs": dict()}, "wall_seconds": int() | float()}:
                return note
        raise UserError(
            f"{self._marker(stage)}: must be an unfinished stage's note; delete it and its folder"
        )

    def _made_from(self, stage: Stage) -> dict[str, Any]:
        """Return the recipe's section and the content hash of every input of a stage."""
        inputs = {}
        for name, folder in self.folders(stage).items():
            record = read_record(folder)
            if record is None:
                raise UserError(
                    f"{folder}: {stage.name} needs it; run the stage {name} first "
                    f"(drafttrain run RECIPE --until {name})"
                )
            inputs[name] = record["output"]
        for path in stage.files(self.recipe):
            inputs[str(path)] = content_hash(path, self.hashes)
        return {"section": as_json(plain(stage.section(self.recipe))), "inputs": inputs}

    def _changes(self, stage: Stage, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
        """List what differs between what a folder was made from and what it would be made from now.

        A field that the old record lacks did not exist in its version: at its default it is no difference.
        Neither is an "auto" that was settled when the folder was made.
        """
        known = as_json(plain(stage.section(self.recipe), old["section"]))
        return differences(old, {**new, "section": known})

    def _write_summary(self) -> None:
        """Write `summary.json`: the figures that sum up the run, and each stage's own, once all are done."""
        stages = [stage for stage in self.stages if stage.enabled(self.recipe)]
        records = [read_record(self.output / stage.folder) for stage in stages]
        if not self.is_first_rank or None in records:
            return
        summary, details = {}, {}
        for stage, record in zip(stages, records):
            figures = record["figures"]
            summary |= {key: figures[key] for key in stage.summary if key in figures}
            details[stage.name] = {**figures, "wall_seconds": record["wall_seconds"]}
        summary["wall_seconds"] = round(sum(record["wall_seconds"] for record in records), 3)
        write_json(self.output / "summary.json", {**summary, "stages": details})

    def select(
        self, first: str | None = None, last: str | None = None, only: str | None = None
    ) -> list[Stage]:
        """Return the stages from `first` to `last`, or `only` one.

        Raises:
            UserError: no such stage, `only` together with another one, or a selected stage needs a file of
                the user's that does not exist.
        """
        if only is not None and (first, last) != (None, None):
            raise UserError(f"--only: must be given without --from and --until, got {only}; leave out either")
        begin = 0 if first is None else self.stages.index(self._stage(first))
        end = len(self.stages) if last is None else self.stages.index(self._stage(last)) + 1
        selected = self.stages[begin:end]
        if not selected:
            raise UserError(f"--until: must not come before --from {first}, got {last}")
        if only is not None:
            selected = [self._stage(only)]
            if not selected[0].enabled(self.recipe):
                raise UserError(f"{only}: this recipe does not ask for it; see its section in the recipe")
        run = [stage.name for stage in selected if stage.enabled(self.recipe)]
        if unused := sorted(self.again.difference(run)):
            raise UserError(
                f"--again: must name a stage that runs, got {unused[0]}; there are {', '.join(run)}"
            )
        for stage in selected:  # all at once, before hours go into the first stage
            for path in stage.files(self.recipe) if stage.enabled(self.recipe) else ():
                if not Path(path).exists():
                    raise UserError(f"{path}: no such file; {stage.name} needs it, correct the recipe's path")
        return selected

    def _stage(self, name: str) -> Stage:
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise UserError(f"{name}: no such stage; there are {', '.join(stage.name for stage in self.stages)}")

    def _marker(self, stage: Stage) -> Path:
        return self.output / STARTED / f"{stage.folder}.json"

    def _say(self, color: str, stage: Stage, action: str, text: str) -> None:
        line = f"[{color}]{stage.name:<12} {action:<6}[/] {escape(text)}"
        self.console.print(line, highlight=False, soft_wrap=True)

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Lock the output folder against other processes; it ends with the process, even a killed one."""
        if not self.is_first_rank:
            yield
            return
        is_new = not self.output.exists()
        self.output.mkdir(parents=True, exist_ok=True)
        try:
            lock = FileLock(self.output / LOCK).acquire(timeout=0)
        except Timeout:
            raise UserError(f"{self.output}: another drafttrain works here; wait for it or end it") from None
        with lock:
            try:
                yield
            except UserError:
                if is_new:
                    self._leave_nothing()
                raise

    def _leave_nothing(self) -> None:
        """Remove an output folder that holds no stage's folder, because it would look like a run; the notes
        of stages that were refused before they made one are not read again."""
        with contextlib.suppress(OSError):
            if {path.name for path in self.output.iterdir()} <= {LOCK, HASHES, STARTED}:
                shutil.rmtree(self.output)


def _seconds(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(round(seconds) // 60, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {round(seconds) % 60:02d} s"
