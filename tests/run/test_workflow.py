"""The workflow over fake stages: what runs, what is skipped, and what an interruption leaves behind."""

import dataclasses
import errno
import io
import json
import os
import shutil
import signal
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from drafttrain.run import ranks, workflow
from drafttrain.run.plan import plan, print_plan
from drafttrain.run.workflow import Stage, Workflow
from drafttrain.utils import provenance
from drafttrain.utils.errors import UserError
from drafttrain.utils.folders import new_folder


@dataclass
class Part:
    path: str
    share: float = 1.0


@dataclass
class Words:
    text: str = "hello"
    parts: list[Part] = field(default_factory=lambda: [Part("a")])
    log: str = field(default="quiet", metadata={"changes_output": False})


@dataclass
class Upper:
    suffix: str = "!"
    dtype: str = field(default="auto", metadata={"settled": True})


@dataclass
class FakeRecipe:
    output: str
    source: str
    words: Words = field(default_factory=Words)
    upper: Upper = field(default_factory=Upper)
    last: bool = True
    seed: int = 7


class Fakes:
    """Three stages that count their runs: `words` (from a file) → `upper` (resumable) → `last` (optional)."""

    def __init__(self):
        self.ran, self.found, self.fail_in, self.error = [], [], None, RuntimeError("boom")
        self.fastest, self.computed_in = "bf16", []
        self.stages = [
            Stage(
                "words",
                "words_made",
                self.words,
                lambda recipe: {"words": recipe.words},
                files=lambda recipe: [recipe.source],
            ),
            Stage(
                "upper",
                "upper_made",
                self.upper,
                lambda recipe: {"upper": recipe.upper},
                self.settle,
                needs=("words",),
                resumes=True,
                keep=True,
                ranks=True,
                summary=("letters",),
            ),
            Stage(
                "last",
                "last_made",
                self.last,
                lambda recipe: {},
                needs=("upper",),
                enabled=lambda recipe: recipe.last,
            ),
        ]

    def words(self, recipe, folders, out):
        assert not out.exists() and folders == {}
        with new_folder(out) as folder:
            (folder / "words.txt").write_text(recipe.words.text + Path(recipe.source).read_text())
            self._step("words")

    def settle(self, recipe, begun):
        dtype = recipe.upper.dtype
        if dtype == "auto":
            dtype = begun.get("upper", {}).get("dtype", self.fastest)
        return dataclasses.replace(recipe, upper=dataclasses.replace(recipe.upper, dtype=dtype))

    def upper(self, recipe, folders, out):
        out.mkdir(exist_ok=True)
        self.computed_in.append(recipe.upper.dtype)
        self.found.append(sorted(path.name for path in out.iterdir()))
        (out / "half.txt").write_text("half")
        self._step("upper")
        text = (folders["words"] / "words.txt").read_text().upper() + recipe.upper.suffix
        (out / "upper.txt").write_text(text)
        return {"letters": len(text), "detail": 1}

    def last(self, recipe, folders, out):
        out.mkdir()
        (out / "last.txt").write_text((folders["upper"] / "upper.txt").read_text())
        self._step("last")

    def refuse(self, recipe, folders, out):
        assert out.parent.joinpath(".hashes.json").exists()
        raise UserError("the source is too small")

    def _step(self, name):
        self.ran.append(name)
        if self.fail_in == name:
            raise self.error


@pytest.fixture(autouse=True)
def no_collection(monkeypatch):
    monkeypatch.setattr(workflow.gc, "collect", lambda: 0)  # 0.2 s each with torch loaded


@pytest.fixture
def fakes() -> Fakes:
    return Fakes()


@pytest.fixture
def recipe(tmp_path) -> FakeRecipe:
    (tmp_path / "in.txt").write_text(" world")
    return FakeRecipe(str(tmp_path / "run"), str(tmp_path / "in.txt"))


def run(recipe, fakes, again=(), **selection) -> tuple[list[str], str]:
    """Names of the stages that ran, and what was printed."""
    fakes.ran.clear()
    console = Console(file=io.StringIO(), width=200)
    Workflow(recipe, fakes.stages, console, again).run(**selection)
    return list(fakes.ran), console.file.getvalue()


def actions(recipe, fakes, **selection) -> dict[str, str]:
    decisions = plan(Workflow(recipe, fakes.stages, Console(quiet=True)), **selection)
    return {decision.stage.name: decision.action for decision in decisions}


def test_runs_in_order_and_records(recipe, fakes):
    ran, printed = run(recipe, fakes)
    assert ran == ["words", "upper", "last"]
    assert (Path(recipe.output) / "last_made" / "last.txt").read_text() == "HELLO WORLD!"
    record = json.loads((Path(recipe.output) / "upper_made" / "stage.json").read_text())
    assert record["made_from"]["section"] == {"upper": {"suffix": "!", "dtype": "bf16"}} and list(
        record["made_from"]["inputs"]
    )
    assert record["seed"] == 7 and record["figures"] == {"letters": 12, "detail": 1}
    assert {"torch", "transformers", "datasets"} <= record["versions"].keys() and "git_commit" in record
    assert record["wall_seconds"] >= 0
    lines = printed.splitlines()
    assert [line.split()[:2] for line in lines[:2]] == [["words", "run"], ["words", "done"]]


def test_skips_what_is_up_to_date(recipe, fakes):
    run(recipe, fakes)
    ran, printed = run(recipe, fakes)
    assert ran == []
    assert [line.split()[:2] for line in printed.splitlines()] == [
        [n, "skip"] for n in ("words", "upper", "last")
    ]


def test_a_stage_is_repeated_when_asked(recipe, fakes):
    """Later stages run only where the repeated stage has made something else."""
    run(recipe, fakes)
    ran, printed = run(recipe, fakes, again=["upper"])
    assert ran == ["upper"] and "upper        run    asked for again" in printed
    assert (Path(recipe.output) / "previous" / "upper_made-1" / "upper.txt").exists()
    fakes.fail_in = "upper"
    with pytest.raises(type(fakes.error)):
        run(recipe, fakes, again=["upper"])
    fakes.fail_in = None
    ran, printed = run(recipe, fakes, again=["upper"])  # the same command continues
    assert ran == ["upper", "last"][: len(ran)] and "was interrupted" in printed
    assert fakes.found[-1] == ["half.txt"]
    for again, wrong in (
        (["uper"], "uper: no such stage"),
        (["last"], "--again: must name a stage that runs"),
    ):
        with pytest.raises(UserError, match=wrong):
            run(recipe, fakes, again=again, last="upper")


@pytest.mark.parametrize("appends", [False, True])
def test_what_another_run_made_from_the_same_is_taken_over(appends, recipe, fakes):
    """With its "auto"; not where settings differ, nor where the stage is asked for again."""
    fakes.stages[1] = dataclasses.replace(fakes.stages[1], shared=True, appends=appends)
    run(recipe, fakes)
    other = dataclasses.replace(recipe, output=f"{recipe.output}-2")
    assert actions(other, fakes) == {
        "words": "run",
        "upper": "run",
        "last": "run",
    }  # of words it is not known yet
    fakes.fastest = "fp32"
    ran, printed = run(other, fakes)
    assert ran == ["words", "last"] and f"{recipe.output}/upper_made was made from the same" in printed
    folder = Path(other.output) / "upper_made"
    assert (folder / "upper.txt").read_text() == "HELLO WORLD!"
    # a stage that goes on in its files must not do so in another run's
    theirs = Path(recipe.output) / "upper_made" / "upper.txt"
    assert (folder / "upper.txt").samefile(theirs) != appends
    record = json.loads((folder / "stage.json").read_text())
    assert record["shared"] == f"{recipe.output}/upper_made" and record["figures"]["letters"] == 12
    assert run(other, fakes)[0] == []
    assert run(other, fakes, again=["upper"])[0] == ["upper"]
    assert theirs.read_text() == "HELLO WORLD!"
    changed = dataclasses.replace(other, upper=Upper("?"))
    assert run(changed, fakes)[0] == ["upper", "last"]
    assert actions(dataclasses.replace(changed, upper=Upper()), fakes)["upper"] == "share"
    assert (Path(recipe.output) / "upper_made" / "upper.txt").read_text() == "HELLO WORLD!"


@pytest.mark.parametrize("damage", ["gone", "cut", "flipped"])
@pytest.mark.parametrize(("stage", "file"), [("words", "words.txt"), ("upper", "upper.txt")])
def test_a_damaged_folder_is_repaired(stage, file, damage, recipe, fakes):
    """By the stage that made it; a stage that resumes finds its other files."""
    run(recipe, fakes)
    path = Path(recipe.output) / f"{stage}_made" / file
    text = path.read_text()
    path.unlink() if damage == "gone" else path.write_text(
        {"cut": text[:3], "flipped": text.swapcase()}[damage]
    )
    assert actions(recipe, fakes)[stage] == ("run" if stage == "words" else "resume")
    ran, printed = run(recipe, fakes)
    assert ran == [stage] and f"damaged: {file}" in printed  # what follows is made from the same again
    assert path.read_text() == text and run(recipe, fakes)[0] == []
    assert fakes.found == ([[]] if stage == "words" else [[], ["half.txt"]])
    kept = Path(recipe.output) / "previous" / f"{stage}_made-1" / file
    assert kept.exists() == (damage != "gone")


def test_killed_while_damaged_files_are_set_aside(recipe, fakes, monkeypatch):
    """The folder must not pass for an unfinished one that still holds its damaged file."""
    run(recipe, fakes)
    path = Path(recipe.output) / "upper_made" / "upper.txt"
    path.write_text("damaged")
    move = os.replace

    def killed(source, target):
        if "previous" in str(target):
            raise KeyboardInterrupt
        move(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        run(recipe, fakes)
    monkeypatch.undo()
    ran, printed = run(recipe, fakes)
    assert ran == ["upper"] and fakes.found[-1] == ["half.txt"] and "damaged: upper.txt" in printed
    assert path.read_text() == "HELLO WORLD!"


def test_checkpoints_may_be_removed(recipe, fakes):
    make = fakes.stages[1].run

    def with_checkpoints(recipe, folders, out):
        found = make(recipe, folders, out)
        (out / "checkpoints" / "best-4").mkdir(parents=True)
        (out / "checkpoints" / "best-4" / "config.json").write_text("{}")
        return found

    fakes.stages[1] = dataclasses.replace(fakes.stages[1], run=with_checkpoints)
    run(recipe, fakes)
    shutil.rmtree(Path(recipe.output) / "upper_made" / "checkpoints")
    assert run(recipe, fakes)[0] == []


def test_files_of_the_users_in_a_folder_are_no_damage(recipe, fakes):
    run(recipe, fakes)
    made = Path(recipe.output) / "last_made"
    (made / "notes.txt").write_text("mine")
    assert run(recipe, fakes)[0] == []
    (made / "last.txt").write_text("changed")  # that is: the stage runs again, and nothing is lost
    ran, printed = run(recipe, fakes)
    kept = Path(recipe.output) / "previous" / "last_made-1"
    assert ran == ["last"] and f"is now {kept}" in printed.replace("\n", "")
    assert (kept / "notes.txt").read_text() == "mine" and (kept / "last.txt").read_text() == "changed"
    (made / "notes.txt").write_text("mine, too")
    recipe.upper.suffix = "?"
    assert run(recipe, fakes)[0] == ["upper", "last"]
    assert (kept.parent / "last_made-2" / "notes.txt").read_text() == "mine, too"
    recipe.upper.suffix = "."
    assert run(recipe, fakes)[0] == ["upper", "last"]
    assert len(list(kept.parent.glob("last_made-*"))) == 2  # what a stage alone has written is made again


def test_a_damaged_twin_is_not_taken_over(recipe, fakes):
    fakes.stages[0] = dataclasses.replace(fakes.stages[0], shared=True)
    run(recipe, fakes)
    other = dataclasses.replace(recipe, output=f"{recipe.output}-2")
    assert actions(other, fakes)["words"] == "share"
    (Path(recipe.output) / "words_made" / "words.txt").write_text("hello")
    assert actions(other, fakes)["words"] == "run"


def test_a_field_that_counted_in_an_earlier_version_changes_nothing(recipe, fakes):
    run(recipe, fakes)
    record = Path(recipe.output) / "words_made" / "stage.json"
    values = json.loads(record.read_text())
    values["made_from"]["section"]["words"]["log"] = "loud"
    record.write_text(json.dumps(values))
    assert run(recipe, fakes)[0] == []


def test_changed_section_reruns_it_and_what_follows(recipe, fakes):
    run(recipe, fakes)
    recipe.upper.suffix = "?"
    ran, printed = run(recipe, fakes)
    assert ran == ["upper", "last"]
    assert "upper.suffix: ! → ?" in printed


def test_changed_input_file_reruns(recipe, fakes):
    run(recipe, fakes)
    os.utime(recipe.source)  # touched, not changed: hashed again, found equal
    assert run(recipe, fakes)[0] == []
    Path(recipe.source).write_text(" there")
    ran, printed = run(recipe, fakes)
    assert ran == ["words", "upper", "last"] and f"{recipe.source} changed" in printed


def test_equal_output_stops_the_chain(recipe, fakes):
    run(recipe, fakes)
    recipe.words.text, previous = "hello world", Path(recipe.source).read_text()
    Path(recipe.source).write_text("")
    assert previous == " world"
    assert run(recipe, fakes)[0] == ["words"]  # another way to the same words.txt


def test_what_only_describes_a_folder_stops_at_it(recipe, fakes):
    """As `corpus.json` does, which names the files that the corpus was compared with."""
    fakes.stages[0] = dataclasses.replace(fakes.stages[0], described_in=("source.txt",))
    words = fakes.stages[0].run

    def described(recipe, folders, out):
        words(recipe, folders, out)
        (out / "source.txt").write_text(recipe.words.text)

    fakes.stages[0] = dataclasses.replace(fakes.stages[0], run=described)
    run(recipe, fakes)
    recipe.words.text = "hello world"
    Path(recipe.source).write_text("")
    assert run(recipe, fakes)[0] == ["words"]
    (Path(recipe.output) / "words_made" / "source.txt").write_text("")  # damaged like any other file
    assert run(recipe, fakes)[0] == ["words"]


def test_settings_that_do_not_change_the_output(recipe, fakes):
    run(recipe, fakes)
    recipe.words.log = "loud"
    assert run(recipe, fakes)[0] == []


def test_settings_that_an_older_version_did_not_know(recipe, fakes):
    """At its default a field that a record lacks makes nothing outdated."""
    run(recipe, fakes)
    for stage, name in (("words", "parts"), ("upper", "suffix")):
        path = Path(recipe.output) / f"{stage}_made" / "stage.json"
        record = json.loads(path.read_text())
        del record["made_from"]["section"][stage][name]
        path.write_text(json.dumps(record))
    assert run(recipe, fakes)[0] == []
    recipe.words.parts = [Part("b")]
    assert actions(recipe, fakes)["words"] == "run"
    recipe.words.parts = [Part("a")]
    recipe.upper.suffix = "?"
    ran, printed = run(recipe, fakes)
    assert ran == ["upper", "last"] and "upper.suffix: None → ?" in printed


def test_settings_of_a_list_that_an_older_version_did_not_know(recipe, fakes):
    run(recipe, fakes)
    path = Path(recipe.output) / "words_made" / "stage.json"
    record = json.loads(path.read_text())
    del record["made_from"]["section"]["words"]["parts"][0]["share"]
    path.write_text(json.dumps(record))
    assert actions(recipe, fakes)["words"] == "skip"
    for parts in ([Part("a", 0.5)], [Part("b")], [Part("a"), Part("a")], []):
        recipe.words.parts = parts
        assert actions(recipe, fakes)["words"] == "run", parts


def settled(recipe) -> str:
    record = Path(recipe.output) / "upper_made" / "stage.json"
    return json.loads(record.read_text())["made_from"]["section"]["upper"]["dtype"]


def test_auto_is_recorded_as_what_it_came_to(recipe, fakes):
    run(recipe, fakes)
    assert settled(recipe) == "bf16" and fakes.computed_in == ["bf16"] and recipe.upper.dtype == "auto"
    fakes.fastest = "fp32"  # another machine: what is made is as good as ever
    assert run(recipe, fakes)[0] == []
    recipe.upper.dtype = "bf16"
    assert run(recipe, fakes)[0] == []
    recipe.upper.dtype = "fp32"
    ran, printed = run(recipe, fakes)
    assert ran == ["upper"] and "upper.dtype: bf16 → fp32" in printed and settled(recipe) == "fp32"
    recipe.upper.dtype, recipe.upper.suffix = "auto", "?"
    fakes.fastest = "bf16"
    assert run(recipe, fakes)[0] == ["upper", "last"] and settled(recipe) == "bf16"  # made again


def test_what_was_begun_keeps_its_dtype(recipe, fakes):
    fakes.fail_in = "upper"
    for _ in range(2):
        with pytest.raises(RuntimeError):
            run(recipe, fakes)
        fakes.fastest = "fp32"
    fakes.fail_in = None
    run(recipe, fakes)
    assert fakes.computed_in == ["bf16"] * 3 and settled(recipe) == "bf16"


def test_an_older_versions_unfinished_folder_is_resumed(recipe, fakes):
    fakes.fail_in = "upper"
    with pytest.raises(RuntimeError):
        run(recipe, fakes)
    marker = next(Path(recipe.output).rglob("upper_made.json"))
    note = json.loads(marker.read_text())
    assert note["made_from"]["section"]["upper"].pop("suffix") == "!"
    marker.write_text(json.dumps(note))
    recipe.upper.suffix = "?"
    assert actions(recipe, fakes)["upper"] == "run"
    recipe.upper.suffix = "!"
    assert actions(recipe, fakes)["upper"] == "resume"
    fakes.fail_in = None
    assert run(recipe, fakes)[0] == ["upper", "last"] and fakes.found == [[], ["half.txt"]]


def test_stage_switched_off(recipe, fakes):
    recipe.last = False
    assert run(recipe, fakes)[0] == ["words", "upper"]
    assert actions(recipe, fakes)["last"] == "off"
    assert (Path(recipe.output) / "summary.json").exists()
    with pytest.raises(UserError, match="last: this recipe does not ask for it"):
        run(recipe, fakes, only="last")


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt(), UserError("no room")])
def test_resumable_stage_gets_its_unfinished_folder_back(recipe, fakes, error):
    fakes.fail_in, fakes.error = "upper", error
    with pytest.raises(type(error)):
        run(recipe, fakes)
    assert not (Path(recipe.output) / "upper_made" / "stage.json").exists()
    assert not (Path(recipe.output) / "summary.json").exists()
    assert actions(recipe, fakes) == {"words": "skip", "upper": "resume", "last": "run"}
    fakes.fail_in = None
    assert run(recipe, fakes)[0] == ["upper", "last"]
    assert fakes.found == [[], ["half.txt"]]


def test_unfinished_folder_of_another_recipe_is_not_resumed(recipe, fakes):
    fakes.fail_in = "upper"
    with pytest.raises(RuntimeError):
        run(recipe, fakes)
    fakes.fail_in, recipe.upper.suffix = None, "?"
    assert actions(recipe, fakes)["upper"] == "run"
    run(recipe, fakes)
    assert fakes.found == [[], []]


def test_outdated_folder_of_a_long_stage_is_kept(recipe, fakes):
    for suffix in "abc":
        recipe.upper.suffix = suffix
        run(recipe, fakes)
    previous = Path(recipe.output) / "previous"
    texts = {path.name: (path / "upper.txt").read_text()[-1] for path in previous.iterdir()}
    assert texts == {"upper_made-1": "a", "upper_made-2": "b"}


@pytest.mark.parametrize("stage", ["words", "upper"])
def test_a_folder_of_something_else_is_kept(stage, recipe, fakes):
    """And named; an empty one is taken."""
    folder = Path(recipe.output) / f"{stage}_made"
    (folder / "mine").mkdir(parents=True)
    (folder / "mine" / "text").write_text("years of work")
    ran, printed = run(recipe, fakes)
    assert stage in ran and "kept" in printed and "previous" in printed
    assert (Path(recipe.output) / f"previous/{stage}_made-1/mine/text").read_text() == "years of work"
    assert not (folder / "mine").exists()


@pytest.mark.parametrize("stage", ["words", "upper", "last"])
def test_kill_in_the_middle(recipe, fakes, stage):
    """SIGKILL inside any stage: its folder is not done, earlier ones are, and the next run completes."""
    pid = os.fork()
    if pid == 0:
        fakes.fail_in = stage
        fakes._step = lambda name: os.kill(os.getpid(), signal.SIGKILL) if name == stage else None
        run(recipe, fakes)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    names = ["words", "upper", "last"]
    assert not (Path(recipe.output) / f"{stage}_made" / "stage.json").exists()
    assert run(recipe, fakes)[0] == names[names.index(stage) :]
    assert (Path(recipe.output) / "last_made" / "last.txt").read_text() == "HELLO WORLD!"
    leftovers = [path.name for path in Path(recipe.output).iterdir() if path.name.endswith((".tmp", ".old"))]
    assert leftovers == []


def test_killed_after_the_work_before_the_record(recipe, fakes, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(workflow, "git_commit", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(recipe, fakes)
    monkeypatch.undo()
    assert run(recipe, fakes)[0] == ["words", "upper", "last"]


def test_from_and_only(recipe, fakes):
    with pytest.raises(UserError, match="upper needs it; run the stage words first .*--until words"):
        run(recipe, fakes, only="upper")
    assert not Path(recipe.output).exists()  # refused, so there is no run
    assert run(recipe, fakes, only="words")[0] == ["words"]
    assert run(recipe, fakes, last="upper")[0] == ["upper"]
    assert run(recipe, fakes, first="last")[0] == ["last"]
    recipe.words.text = "bye"
    ran, printed = run(recipe, fakes, only="upper")
    assert ran == [] and "words        stale  used unchanged, but words.text: hello → bye" in printed
    with pytest.raises(UserError, match="train: no such stage; there are words, upper, last"):
        run(recipe, fakes, first="train")
    with pytest.raises(UserError, match="train: no such stage"):
        run(recipe, fakes, last="train")
    with pytest.raises(UserError, match="--until: must not come before --from upper, got words"):
        run(recipe, fakes, first="upper", last="words")


def test_a_refusal_leaves_what_was_there(recipe, fakes):
    """A folder of the user's own stays, and so does one that holds the work of an earlier stage."""
    Path(recipe.output).mkdir()
    with pytest.raises(UserError, match="upper needs it"):
        run(recipe, fakes, only="upper")
    assert Path(recipe.output).exists()
    Path(recipe.output, ".lock").unlink(missing_ok=True)
    Path(recipe.output).rmdir()
    fakes.fail_in, fakes.error = "upper", UserError("no")
    with pytest.raises(UserError, match="^no$"):
        run(recipe, fakes)
    assert Path(recipe.output, "words_made", "stage.json").exists()


@pytest.mark.parametrize("stage", ["words", "upper"])
def test_what_a_refused_run_leaves(stage, recipe, fakes):
    """Nothing, where a stage refused before it made a folder; else what an earlier stage has made."""
    refusing = dataclasses.replace(fakes.stages[0 if stage == "words" else 1], run=fakes.refuse)
    fakes.stages = [refusing if kept.name == stage else kept for kept in fakes.stages]
    with pytest.raises(UserError, match="too small"):
        run(recipe, fakes)
    assert Path(recipe.output).exists() == (stage == "upper")
    with pytest.raises(UserError, match="too small"):  # and there is nothing to resume
        run(recipe, fakes)


def test_missing_file_is_found_before_anything_runs(recipe, fakes):
    late = dataclasses.replace(fakes.stages[2], files=lambda recipe: ["nowhere.json"])
    fakes.stages[2] = late
    with pytest.raises(UserError, match="nowhere.json: no such file; last needs it"):
        run(recipe, fakes)
    assert fakes.ran == [] and not Path(recipe.output).exists()


def test_dry_run_changes_nothing(recipe, fakes):
    assert actions(recipe, fakes) == {"words": "run", "upper": "run", "last": "run"}
    assert not Path(recipe.output).exists()
    run(recipe, fakes)
    recipe.words.text = "bye"
    before = {path: path.stat().st_mtime_ns for path in Path(recipe.output).rglob("*")}
    console = Console(file=io.StringIO(), width=200)

    def estimate(stage, recipe, folders):
        return {"disk": "3 GB", "reads": folders["words"].name} if stage == "upper" else {}

    flow = Workflow(recipe, fakes.stages, console)
    print_plan(flow, plan(flow), estimate)
    printed = console.file.getvalue()
    assert "words.text: hello → bye" in printed and "words will be made again" in printed
    assert "disk: 3 GB" in printed and "reads: words_made" in printed
    assert {path: path.stat().st_mtime_ns for path in Path(recipe.output).rglob("*")} == before


def test_brackets_in_the_name_of_a_run_are_no_markup(recipe, fakes):
    recipe.output += "[/b]"
    console = Console(file=io.StringIO(), width=200)
    flow = Workflow(recipe, fakes.stages, console)
    print_plan(flow, plan(flow), lambda stage, recipe, folders: {})
    printed = "".join(console.file.getvalue().split())  # the title is wrapped at the table's width
    assert "/run[/b]:whatwouldrun" in printed


def test_summary(recipe, fakes):
    run(recipe, fakes)
    summary = json.loads((Path(recipe.output) / "summary.json").read_text())
    assert summary["letters"] == 12 and "detail" not in summary
    assert summary["stages"]["upper"]["detail"] == 1
    walls = [stage["wall_seconds"] for stage in summary["stages"].values()]
    assert summary["wall_seconds"] == pytest.approx(sum(walls), abs=2e-3)


def test_wall_time_adds_up_over_an_interruption(recipe, fakes, monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(workflow.time, "monotonic", lambda: next(clock))
    fakes.fail_in = "upper"
    with pytest.raises(RuntimeError):
        run(recipe, fakes)
    fakes.fail_in = None
    run(recipe, fakes)
    record = json.loads((Path(recipe.output) / "upper_made" / "stage.json").read_text())
    assert record["wall_seconds"] == 20


def test_wall_time_of_a_killed_attempt_counts_to_its_last_file(recipe, fakes):
    fakes.fail_in = "upper"
    with pytest.raises(RuntimeError):
        run(recipe, fakes)
    output = Path(recipe.output)
    marker = next(output.rglob("upper_made.json"))
    half = output / "upper_made" / "half.txt"
    os.utime(marker, (1000, 1000))  # as if it had been killed: the marker is from its beginning
    os.utime(half, (1090, 1090))
    fakes.fail_in = None
    run(recipe, fakes)
    record = json.loads((output / "upper_made" / "stage.json").read_text())
    assert 90 <= record["wall_seconds"] < 100


def test_one_process_at_a_time(recipe, fakes):
    flow = Workflow(recipe, fakes.stages, Console(quiet=True))
    with flow._lock(), pytest.raises(UserError, match="another drafttrain works here"):
        run(recipe, fakes)
    assert run(recipe, fakes)[0] == ["words", "upper", "last"]


def test_an_empty_rank_is_none(recipe, fakes, monkeypatch):
    """As after `export RANK=$OMPI_COMM_WORLD_RANK` without mpirun."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
    assert run(recipe, fakes)[0] == ["words", "upper", "last"]


def test_second_rank_runs_the_stage_and_writes_no_record(recipe, fakes, monkeypatch):
    run(recipe, fakes, only="words")
    monkeypatch.setenv("WORLD_SIZE", "2")
    fakes.fail_in = "upper"
    with pytest.raises(RuntimeError):  # the first rank has begun and noted what it makes
        run(recipe, fakes, only="upper")
    fakes.fail_in = None
    monkeypatch.setenv("RANK", "1")
    fakes.fastest = "fp32"  # as it measures; it takes the first rank's choice
    assert run(recipe, fakes, only="upper")[0] == ["upper"] and fakes.computed_in == ["bf16", "bf16"]
    assert not (Path(recipe.output) / "upper_made" / "stage.json").exists()


def test_a_second_rank_waits_for_the_record_of_a_stage(recipe, fakes, monkeypatch):
    """The first one may hash its files for minutes."""
    fakes.stages[2] = dataclasses.replace(fakes.stages[2], ranks=True)
    run(recipe, fakes)
    records = [Path(recipe.output) / f"{name}_made" / "stage.json" for name in ("upper", "last")]
    texts = [path.read_text() for path in records]
    for path, text in zip(records, texts):  # both have begun again
        made_from = json.loads(text)["made_from"]
        marker = Path(recipe.output) / ".started" / f"{path.parent.name}.json"
        marker.write_text(json.dumps({"made_from": made_from, "wall_seconds": 0.0}))
        path.unlink()
    shutil.rmtree(records[1].parent)
    make = fakes.stages[1].run

    def upper(recipe, folders, out):
        threading.Timer(0.3, records[0].write_text, [texts[0]]).start()
        return make(recipe, folders, out)

    fakes.stages[1] = dataclasses.replace(fakes.stages[1], run=upper)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert run(recipe, fakes, first="upper")[0] == ["upper", "last"]
    records[0].unlink()
    fakes.stages[1] = dataclasses.replace(fakes.stages[1], run=make)
    monkeypatch.setattr(ranks, "WAITS", 2)
    with pytest.raises(UserError, match="the first process did not write it"):
        run(recipe, fakes, first="upper")


def test_stage_for_one_process_refuses_several(recipe, fakes, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="words: must run in one process"):
        run(recipe, fakes)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"made_from": {"section": {}}, "wall_seconds": 1}'])
def test_broken_note_of_an_unfinished_stage(text, recipe, fakes):
    fakes.fail_in = "upper"
    with pytest.raises(RuntimeError):
        run(recipe, fakes)
    (Path(recipe.output) / ".started" / "upper_made.json").write_text(text)
    with pytest.raises(UserError, match="delete it"):
        run(recipe, fakes)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"made_from": [], "output": "", "figures": {}}'])
def test_broken_record_is_an_error_that_says_what_to_do(text, recipe, fakes):
    run(recipe, fakes)
    (Path(recipe.output) / "words_made" / "stage.json").write_text(text)
    with pytest.raises(UserError, match="delete (it|its folder) and make it again"):
        run(recipe, fakes)


def test_full_disk_names_the_output_folder(recipe, fakes):
    fakes.fail_in, fakes.error = (
        "upper",
        OSError(errno.ENOSPC, "No space left on device"),
    )  # as `write` raises it
    with pytest.raises(UserError, match=f"^{recipe.output}: no space left"):
        run(recipe, fakes)


def test_input_that_cannot_be_read(tmp_path):
    (tmp_path / "x").write_text("1")

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied")

    for path in (tmp_path, tmp_path / "x"):
        with pytest.raises(UserError, match=r"x: cannot be read \(Permission denied\)"):
            provenance.content_hash(path, refuse)


def test_content_hash(tmp_path):
    folder = tmp_path / "a"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "x").write_text("1")
    first = provenance.content_hash(folder)
    for ignored in ("stage.json", "cache-1.arrow", ".hidden"):
        (folder / ignored).write_text("x")
    (folder / "checkpoint-10").mkdir()
    (folder / "checkpoint-10" / "weights").write_text("x")
    assert provenance.content_hash(folder) == first
    (folder / "cache-1.jsonl").write_text("a row")  # which is read
    assert provenance.content_hash(folder) != first
    (folder / "cache-1.jsonl").unlink()
    (folder / "sub" / "x").rename(folder / "sub" / "y")
    renamed = provenance.content_hash(folder)
    (folder / "sub" / "y").write_text("2")
    assert len({first, renamed, provenance.content_hash(folder)}) == 3


def test_hashes_are_remembered_by_size_and_time(tmp_path, monkeypatch):
    file = tmp_path / "x"
    file.write_text("1")
    hashes = provenance.Hashes(tmp_path / "hashes.json")
    value = hashes(file)
    hashes.save()
    for broken in ([], {str(file): {}}, {str(file): []}, {str(file): [1, file.stat().st_mtime_ns, None]}):
        (tmp_path / "broken.json").write_text(json.dumps(broken))
        assert provenance.Hashes(tmp_path / "broken.json")(file) == value
    monkeypatch.setattr(provenance, "sha256_file", lambda path: pytest.fail("hashed again"))
    assert provenance.Hashes(tmp_path / "hashes.json")(file) == value
    monkeypatch.undo()
    file.write_text("22")
    assert provenance.Hashes(tmp_path / "hashes.json")(file) != value
