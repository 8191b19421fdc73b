"""A sample of hostile input, kills and faults; `python -m studies.hostile` runs all of it."""

import json
import os
import subprocess
import sys
import time

import pytest

from studies import ROOT
from tests.hasty import hasty_calibrations
from tests.hostile import faults, mutations, results, runner
from tests.hostile.cases import COMMANDS, READ, make
from tests.hostile.every_case import every_case
from tests.hostile.mutations import Mutation

EVERY = 120  # one case of 120
SHARE = 30  # one writer, or pair, of 30: a light one among the writers


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    place = tmp_path_factory.mktemp("hostile") / "world"
    with hasty_calibrations():
        make(place)
        yield place


def test_hostile_files_end_in_one_line(world, tmp_path):
    found = [runner.run(case, world, tmp_path / str(i)) for i, case in enumerate(every_case(world, EVERY))]
    assert len(found) > 20 and {one.verdict for one in found} >= {"refused"}
    wrong = [f"{one.verdict}: {one.case}\n{one.error}" for one in found if not one.is_right]
    assert not wrong, "\n".join(wrong)


def test_the_world_itself_is_accepted(world, tmp_path):
    """Else every refusal would be right for another reason."""
    for command, files in READ.items():
        file = next(iter(files))
        same = Mutation("same", (world / file).read_bytes(), False)
        outcome = runner.run(runner.Case(command, file, same, COMMANDS[command]), world, tmp_path / "same")
        assert (outcome.verdict, outcome.status) == ("done", 0), outcome


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda words: 2, "lines"),  # without a word
        (lambda words: 0, "wrong success"),
        (lambda words: 1 / 0, "traceback"),
        (lambda words: os.kill(os.getpid(), 11), "traceback"),
        (lambda words: time.sleep(60), "hang"),
        (lambda words: print("drafttrain: no", file=__import__("sys").stderr) or 2, "refused"),
        (lambda words: open("target.txt", "a").write("x") and 2, "touched"),
        (lambda words: open("ran", "w").close(), "executed"),
    ],
)
def test_the_judge_sees_every_kind_of_failure(tmp_path, monkeypatch, function, expected):
    import drafttrain.run.cli

    monkeypatch.setattr(drafttrain.run.cli, "main", function)
    if expected == "hang":
        monkeypatch.setattr(runner, "LIMIT", 1.0)
    (tmp_path / "world").mkdir()
    (tmp_path / "world" / "target.txt").write_text("x")
    (tmp_path / "world" / "file.json").write_text("{}")
    case = runner.Case("x", "file.json", Mutation("empty", b""), ())
    assert runner.run(case, tmp_path / "world", tmp_path / "case").verdict == expected


def test_mutations_change_a_file(tmp_path):
    value = {"a": 1, "b": [{"c": "y"}]}
    content = json.dumps(value).encode()
    names = [mutation.name for mutation in mutations.json_file(content)]
    assert len(names) == len(set(names)) > 60 and {"a NaN", "b.0.c NUL", "without b"} <= set(names)
    for mutation in mutations.json_file(content):
        assert mutation.content != content
        path = tmp_path / "file"
        path.write_bytes(content)
        mutation.apply(path)
        if path.is_symlink() or not path.is_dir():
            path.unlink(missing_ok=True)
        else:
            path.rmdir()


def test_a_sample_of_kills_faults_and_pairs(tmp_path):
    """In a process of its own: the layer under the files has to be loaded first."""
    if faults.build(tmp_path) is None:
        pytest.skip("no C compiler")
    parts = "kills", "signals", "faults", "together"
    words = ["-m", "studies.hostile", "--part", *parts, "--every", str(SHARE), "--out", str(tmp_path)]
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True, capture_output=True)
    for part in parts:
        rows = [json.loads(line) for line in (tmp_path / f"{part}.jsonl").read_text().splitlines()]
        assert rows and all(row["verdict"] in ("resumed", "absorbed", "right") for row in rows), rows


WRITE = """
import json, os, sys
from tests.hostile.faults import arming
end = arming(__import__("pathlib").Path(sys.argv[1]), sys.argv[2] or None, int(sys.argv[3]),
             __import__("pathlib").Path(sys.argv[1] + ".counts"))()
with open(sys.argv[1] + "/file", "w") as file:
    for i in range(4):
        file.write("line\\n")
        file.flush()
    os.fsync(file.fileno())
os.replace(sys.argv[1] + "/file", sys.argv[1] + "/name")
end()
"""


@pytest.mark.parametrize(
    ("fault", "number", "error", "left"),
    [
        ("", 0, "", {"name": 20}),
        ("kill", 3, None, {"file": 10}),
        ("full disk", 3, "No space left", {"file": 10}),
        ("short write", 2, "", {"name": 20}),
        ("failed rename", 1, "Input/output error", {"file": 20}),
        ("failed sync", 1, "Input/output error", {"file": 20}),
    ],
)
def test_the_layer_of_faults(fault, number, error, left, tmp_path):
    if (library := faults.build(tmp_path)) is None:
        pytest.skip("no C compiler")
    out = tmp_path / "out"
    out.mkdir()
    found = subprocess.run(
        [sys.executable, "-c", WRITE, str(out), fault, str(number)],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
    )
    assert (error or "") in found.stderr and (found.returncode == 0) == (error == "")
    assert {path.name: path.stat().st_size for path in out.iterdir()} == left
    if not error and error is not None:
        assert (tmp_path / "out.counts").read_text().split() == ["5" if fault else "4", "1", "1"]


def test_what_two_runs_have_in_common(tmp_path):
    for i in range(2):
        folder = tmp_path / str(i)
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "a.json").write_text(json.dumps({"n": 1, "seconds": i, "odd": i, "at": str(folder / "x")}))
        (folder / "b.bin").write_bytes(b"1")
        (folder / "checkpoints" / "c").write_text(str(i))
    runs = [results.read(tmp_path / str(i)) for i in range(2)]
    common = results.stable(runs)
    assert common["a.json:0.n"] == 1 and common["a.json:0.odd"] is None and "a.json:0.seconds" not in common
    assert not any(place.startswith("checkpoints") for place in common)
    assert results.difference(common, runs[1]) is None
    assert "b.bin" in results.difference(common, {**runs[1], "b.bin": "other"})
    assert "missing" in results.difference(common, {k: v for k, v in runs[1].items() if k != "a.json:0.odd"})
