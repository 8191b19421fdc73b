"""Folders appear whole, and what killed processes leave is cleared."""

import os
import signal
import subprocess
import sys

import pytest

from drafttrain.utils.errors import UserError
from drafttrain.utils.folders import make_out, new_folder

KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from drafttrain.utils import folders
real = os.replace
def replace(a, b):
    if sys.argv[2] == "before" or str(a).endswith(".tmp"):
        os.kill(os.getpid(), signal.SIGKILL)
    real(a, b)
folders.os.replace = replace
with folders.new_folder(sys.argv[1]) as folder:
    (folder / "a").write_text("new")
"""


def test_a_folder_for_results_is_made_or_refused_in_one_line(tmp_path, monkeypatch):
    for _ in range(2):
        make_out(tmp_path / "a" / "b")
        assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "x"):
        with pytest.raises(UserError, match="out: must be a folder, got .*, which is a file or in one; name"):
            make_out(place)
    with pytest.raises(
        UserError, match="out: must be a folder that can be made, got .* \\(File name too long"
    ):
        make_out(tmp_path / ("x" * 300))
    monkeypatch.setattr(os, "access", lambda *names: False)  # root may write to any
    with pytest.raises(UserError, match="out: must be a folder that can be written to, got "):
        make_out(tmp_path)


def test_a_folder_appears_when_it_is_whole(tmp_path):
    with new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
        assert not (tmp_path / "out").exists()
    with pytest.raises(KeyboardInterrupt):
        with new_folder(tmp_path / "out") as folder:
            (folder / "a").write_text("half")
            raise KeyboardInterrupt
    assert (tmp_path / "out" / "a").read_text() == "1"
    with new_folder(tmp_path / "out") as folder:
        (folder / "b").write_text("2")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["out", "out/b"]


def test_a_link_stays_one(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    with new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("1")
    assert (tmp_path / "out").is_symlink() and (tmp_path / "disk" / "a").read_text() == "1"
    assert sorted(os.listdir(tmp_path)) == ["disk", "out"]


@pytest.mark.parametrize("when", ["before", "between"])
def test_leftovers_of_a_killed_process_are_cleared(tmp_path, when):
    """Killed before the first rename, and between the one of the old folder and that of the new one."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").write_text("old")
    (tmp_path / ".out.elsewhere-1-0.tmp").mkdir()  # of another machine
    with new_folder(tmp_path / "other"):
        done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "out"), when])
        assert done.returncode == -signal.SIGKILL and (tmp_path / "out").exists() == (when == "before")
        with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "out"):
            assert (tmp_path / "out" / "a").read_text() == "old"
            assert sum(path.name.startswith(".other") for path in tmp_path.iterdir()) == 1
            raise KeyboardInterrupt
    assert sorted(os.listdir(tmp_path)) == [".out.elsewhere-1-0.tmp", "other", "out"]
