"""`scripts/setup.sh` on a machine where everything is installed already."""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of the script in a folder with a .venv of this pyproject.toml, whose drafttrain does nothing."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/setup.sh", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/drafttrain").write_text('#!/bin/sh\necho "drafttrain $*"\n')
    (tmp_path / ".venv/bin/python").write_text("#!/bin/sh\n")  # compiles the kernels
    for program in ("drafttrain", "python"):
        (tmp_path / ".venv/bin" / program).chmod(0o755)
    wanted = (tmp_path / "pyproject.toml").read_bytes() + os.fsencode(tmp_path.resolve())
    (tmp_path / ".venv/installed").write_text(hashlib.sha256(wanted).hexdigest() + "\n")
    (tmp_path / "bin").mkdir()
    for name in ("cat", "dirname", "sh"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    return tmp_path


def set_up(checkout: Path) -> subprocess.CompletedProcess:
    environment = {"PATH": str(checkout / "bin"), "PYTHON": sys.executable}
    script = str(checkout / "scripts/setup.sh")
    return subprocess.run([shutil.which("bash"), script], capture_output=True, text=True, env=environment)


def test_no_compiler_is_a_notice(checkout):
    done = set_up(checkout)
    assert (done.returncode, done.stdout) == (0, "drafttrain fetch-target smollm2-135m-instruct\n")
    assert done.stderr.startswith("setup: no C++ compiler: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["c++", "g++", "clang++"])
def test_any_compiler_will_do(checkout, name):
    (checkout / "bin" / name).symlink_to(shutil.which("true"))
    done = set_up(checkout)
    assert (done.returncode, done.stderr) == (0, "")
