"""`scripts/setup.sh`, with stubs for what it installs."""

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


def set_up(checkout: Path, python: str = sys.executable) -> subprocess.CompletedProcess:
    environment = {"PATH": str(checkout / "bin"), "PYTHON": python}
    # As its callers read it: an error anywhere stops it.
    read = f"set -euo pipefail; . {checkout / 'scripts/setup.sh'}"
    return subprocess.run([shutil.which("bash"), "-c", read], capture_output=True, text=True, env=environment)


def test_no_compiler_is_a_notice(checkout):
    done = set_up(checkout)
    assert (done.returncode, done.stdout) == (0, "drafttrain fetch-target smollm2-135m-instruct\n")
    assert done.stderr.startswith("setup: no C++ compiler: ") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("name", ["c++", "g++", "clang++"])
def test_any_compiler_will_do(checkout, name):
    (checkout / "bin" / name).symlink_to(shutil.which("true"))
    done = set_up(checkout)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_environment_of_another_folder_is_made_again(checkout):
    """The scripts of an environment name its folder, so a clone that was moved needs a new one."""
    (checkout / "bin/c++").symlink_to(shutil.which("true"))
    activate = checkout / ".venv/bin/activate"
    (checkout / "it's").symlink_to(checkout)
    here, there = (checkout / ".venv", checkout / "it's/.venv"), "/somewhere/else/.venv"
    for place, again in (*((one, "") for one in here), (there, there)):
        activate.write_text(f'# sets\nVIRTUAL_ENV="{place}"\nexport VIRTUAL_ENV\n')
        done = set_up(checkout, "true")  # makes nothing
        assert ("making .venv again: it was made as" in done.stderr) == bool(again)
        assert again in done.stderr


def test_an_interpreter_may_have_a_space_in_its_path(checkout):
    (checkout / "bin/c++").symlink_to(shutil.which("true"))
    (checkout / "my python").symlink_to(sys.executable)
    done = set_up(checkout, str(checkout / "my python"))
    assert (done.returncode, done.stderr) == (0, "")


def test_a_fresh_clone_gets_an_environment(checkout):
    """Makes .venv, installs torch before drafttrain, and leaves the mark of what is installed."""
    (checkout / ".venv").rename(checkout / "installed")  # what `python -m venv` will make
    (checkout / "installed/installed").unlink()
    (checkout / "installed/bin/python").write_text('#!/bin/sh\necho "$*" >>calls\n')
    (checkout / "bin/c++").symlink_to(shutil.which("true"))
    (checkout / "bin/mv").symlink_to(shutil.which("mv"))
    python = checkout / "python"
    python.write_text(
        '#!/bin/sh\ncase "$*" in\n*--clear*) mv installed .venv ;;\n*hashlib*) echo wanted ;;\nesac\n'
    )
    python.chmod(0o755)
    done = set_up(checkout, str(python))
    assert (done.returncode, done.stdout) == (0, "drafttrain fetch-target smollm2-135m-instruct\n")
    assert done.stderr == "setup: installing into .venv; this takes some minutes the first time\n"
    assert (checkout / ".venv/installed").read_text() == "wanted\n"
    installs = [line for line in (checkout / "calls").read_text().splitlines() if " install " in line]
    assert [line.split()[-1] for line in installs] == ["pip>=23.1", "torch>=2.8,<2.14", ".[test]"]
