"""Files and folders that are whole or absent, and what an error shows of the disk."""

import errno
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from drafttrain.utils import hashes
from drafttrain.utils.disk import disk_problem, require_free_disk
from drafttrain.utils.errors import UserError
from drafttrain.utils.files import fingerprint, read_json
from drafttrain.utils.writing import write_json


@dataclass
class Point:
    x: int
    path: Path


def test_fingerprint_is_of_the_contents():
    same = {
        fingerprint({"a": 1, "b": [Point(1, Path("p"))]}),
        fingerprint({"b": [{"x": 1, "path": "p"}], "a": 1}),
    }
    assert len(same) == 1 and len(same.pop()) == 16
    assert fingerprint([1]) != fingerprint([2])
    with pytest.raises(TypeError):
        fingerprint({1, 2})


def test_json_comes_back(tmp_path):
    write_json(tmp_path / "new" / "a.json", {"é": [1, None]})
    assert read_json(tmp_path / "new" / "a.json") == {"é": [1, None]}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]


def test_a_failed_write_keeps_the_old_json(tmp_path):
    write_json(tmp_path / "a.json", 1)
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", [2, object()])
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"] and read_json(tmp_path / "a.json") == 1


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", None])
def test_json_that_cannot_be_read(tmp_path, data):
    if data is not None:
        (tmp_path / "a.json").write_bytes(data)
    with pytest.raises(UserError, match="a.json: (no such file|cannot be read as JSON)") as caught:
        read_json(tmp_path / "a.json")
    assert "\n" not in str(caught.value)


def test_free_disk(tmp_path):
    require_free_disk(tmp_path / "not" / "yet", 1, "a trifle")
    with pytest.raises(UserError, match="yet: the moon needs 1000000000000.00 GB"):
        require_free_disk(tmp_path / "not" / "yet", 10**21, "the moon")


def test_sha256(tmp_path):
    (tmp_path / "a").write_bytes(b"abc")
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert hashes.sha256_file(tmp_path / "a") == expected


@pytest.mark.parametrize(
    "error, expected",
    [
        (OSError(errno.ENOSPC, "No space left on device"), "runs: no space left"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "x"), "x: no space left"),
        (ValueError("I/O error: No space left on device (os error 28)"), "runs: no space left"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "x"), "x: Is a directory; choose another place"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x"), "x: File name too long; choose another"),
        (OSError("something else"), None),
        (FileNotFoundError(errno.ENOENT, "No such file", "x"), None),  # may be a bug of ours
        (json.JSONDecodeError("Expecting value", "", 0), None),
    ],
)
def test_what_an_error_shows_of_the_disk(error, expected):
    found = disk_problem(error, "runs")
    assert found is None if expected is None else found.startswith(expected)


def test_a_folder_in_place_of_a_file_is_named_itself(tmp_path):
    with pytest.raises(OSError) as caught:
        write_json(tmp_path, 1)
    assert disk_problem(caught.value).startswith(f"{tmp_path}: Is a directory; ")


def test_a_full_disk_inside_another_error():
    try:
        try:
            raise OSError(errno.ENOSPC, "No space left on device", "weights.bin")
        except OSError:
            raise RuntimeError("unexpected pos 64 vs 0")  # noqa: B904 - as torch.save ends
    except RuntimeError as error:
        assert disk_problem(error).startswith("weights.bin: no space left")


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_only_files_are_written(kind, tmp_path):
    """A device would be replaced by a file, for everybody."""
    place = tmp_path / "pipe" if kind == "pipe" else Path("/dev/null")
    if kind == "pipe":
        os.mkfifo(place)
    with pytest.raises(UserError, match="must be a file, got a device or a pipe; name a file"):
        write_json(place, {})
    assert not place.is_file()
