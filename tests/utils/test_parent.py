"""A process ends with its parent, even if that is killed."""

import subprocess
import sys
import time

STARTS = """
import os, time
child = os.fork()
if not child:
    from drafttrain.utils.parent import end_with
    end_with(os.getppid())
    print(os.getpid(), flush=True)
    time.sleep(60)
time.sleep(60)
"""


def test_a_child_ends_when_its_parent_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    time.sleep(1)
    assert is_there(child)
    parent.kill()
    parent.wait()
    ends = time.monotonic() + 10
    while is_there(child) and time.monotonic() < ends:
        time.sleep(0.1)
    assert not is_there(child)


def is_there(process: int) -> bool:
    """Return whether a process runs, one that has ended but was not waited for excluded."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
