"""A file or folder is written by one process at a time."""

import os
import subprocess
import sys

import pytest
from filelock import FileLock, Timeout

from drafttrain.utils.errors import UserError
from drafttrain.utils.locks import locked

HOLD = """
import sys
from drafttrain.utils.locks import locked
with locked(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def holder(tmp_path):
    """A process that holds `out`."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / "out")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.wait()


def test_a_second_process_is_refused_until_the_first_ends(holder, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "out")
    for place in (tmp_path / "out", str(tmp_path / "here" / ".." / "out"), tmp_path / "link"):
        with pytest.raises(UserError, match="(out|link): must be written by one process at a time, got a"):
            with locked(place):
                pass
    with locked(tmp_path / "other"):
        pass
    holder.kill()
    holder.wait()
    with locked(tmp_path / "out"), pytest.raises(UserError), locked(tmp_path / "out"):
        pass
    with locked(tmp_path / "out"):
        assert not (tmp_path / "out").exists()  # nothing is written there


def test_a_command_refuses_what_another_writes(holder, tmp_path):
    command = [
        sys.executable,
        "-m",
        "drafttrain.run.cli",
        "report",
        str(tmp_path),
        "--out",
        str(tmp_path / "out"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr.startswith("drafttrain: ") and "must be written by one process" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_read_only_cache_does_not_matter(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "tmp"))
    monkeypatch.setattr(os, "access", lambda place, mode: tmp_path / "cache" not in place.parents)
    with locked(tmp_path / "out"):
        assert len(list((tmp_path / "tmp").rglob("*.lock"))) == 1


def test_without_any_place_for_locks_it_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    (tmp_path / "cache").write_text("")
    with pytest.raises(UserError, match="cache: must be writable, got a read-only folder"), locked("out"):
        pass


def test_what_is_part_of_a_run_is_kept_from_it(tmp_path):
    """Twice within a process, as where trees and classifier are in one bundle."""
    (tmp_path / "run" / "bundle").mkdir(parents=True)
    lock = tmp_path / "run" / ".lock"
    lock.touch()
    (tmp_path / "run" / ".hashes.json").touch()
    with locked(tmp_path / "run" / "bundle"), locked(tmp_path / "run" / "bundle" / "trees"):
        with pytest.raises(Timeout):
            FileLock(lock).acquire(timeout=0)
    with FileLock(lock).acquire(timeout=0):
        with pytest.raises(UserError, match="bundle: must be written by one process at a time"):
            with locked(tmp_path / "run" / "bundle"):
                pass
        with locked(tmp_path / "elsewhere"):
            pass


def test_a_user_without_a_name(monkeypatch, tmp_path):
    """As in a container that is given a number for one."""

    def unknown():
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", unknown)
    with locked(tmp_path / "out"):
        pass
