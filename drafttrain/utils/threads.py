"""Number of threads that compute: one for each physical core that this process may use.

A second thread on a core adds nothing to matrix products, and threads beyond a container's quota are stopped
in the middle of a step until the next period. OMP_NUM_THREADS, where it is set, is the user's choice.
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
CGROUPS = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")
VARIABLE = "OMP_NUM_THREADS"


def default_threads() -> int:
    """Return OMP_NUM_THREADS if it is set, else `usable_cores()`."""
    chosen = os.environ.get(VARIABLE, "").split(",")[0].strip()  # a list has a number for each nested level
    if chosen.isdecimal() and int(chosen) > 0:
        return int(chosen)
    return usable_cores()


def usable_cores() -> int:
    """Return the physical cores in the process's affinity mask, at most the cgroup's CPU quota (rounded up);
    at least 1."""
    return max(1, math.ceil(min(_physical_cores(), _quota())))


def limit_threads() -> None:
    """Lower torch's number of threads to `default_threads()`. A lower one is kept: only a call of
    `torch.set_num_threads` can have set it."""
    import torch

    if torch.get_num_threads() > (limit := default_threads()):
        torch.set_num_threads(limit)


def _physical_cores() -> int:
    if not hasattr(os, "sched_getaffinity"):  # macOS, Windows
        return os.cpu_count() or 1
    cpus = os.sched_getaffinity(0)
    try:  # threads of one core have the same list of siblings
        return len({(CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip() for cpu in cpus})
    except OSError:
        return len(cpus)


def _quota() -> float:
    """Return the CPUs that the cgroups of this process grant it; infinity without a limit."""
    return min(map(_limit, cgroups("cpu")), default=math.inf)


def cgroups(controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroups that have a controller, and those of their parents."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:  # "0::/path" of version 2, "4:cpu,cpuacct:/path" of version 1
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = CGROUPS / controller if controllers else CGROUPS  # a link where several are mounted together
        own = root / path.lstrip("/")  # not there in a container that sees its own cgroup as the root
        yield from (folder for folder in (own, *own.parents) if folder.is_relative_to(root))


def _limit(folder: Path) -> float:
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        share = float(quota) / float(period)
    except (OSError, ValueError):  # no such file; "max": no limit
        return math.inf
    return share if share > 0 else math.inf  # -1: no limit
