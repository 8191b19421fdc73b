"""A sample of hostile input ends in one line each; `python -m studies.hostile` runs all of it."""

import json
import os
import time

import pytest

from tests.hostile import mutations, runner
from tests.hostile.cases import cases, make
from tests.hostile.mutations import Mutation

EVERY = 60  # one case of 60


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    place = tmp_path_factory.mktemp("hostile") / "world"
    make(place)
    return place


def test_hostile_files_end_in_one_line(world, tmp_path):
    found = [runner.run(case, world, tmp_path / str(i)) for i, case in enumerate(cases(world, EVERY))]
    assert len(found) > 20 and {one.verdict for one in found} >= {"refused"}
    wrong = [f"{one.verdict}: {one.case}\n{one.error}" for one in found if not one.is_right]
    assert not wrong, "\n".join(wrong)


def test_the_world_itself_is_accepted(world, tmp_path):
    """Else every refusal would be right for another reason."""
    seen = set()
    for case in cases(world, 10**9):
        if case.command not in seen:
            seen.add(case.command)
            content = (world / case.file).read_bytes()
            same = runner.Case(case.command, case.file, Mutation("same", content, False), case.words)
            outcome = runner.run(same, world, tmp_path / "same")
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
