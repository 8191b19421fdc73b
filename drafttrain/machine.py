"""What a measurement depends on besides the code: the machine, its threads, and who else uses it.

With two threads on two busy cores one forward was seen to take 1.9 s instead of 25 ms: threads that wait for
each other are not scheduled together. So timings look at what other processes do before and while they run.
"""

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch

from drafttrain.errors import UserError
from drafttrain.kernels.build import variant
from drafttrain.threads import usable_cores

STAT, CPUINFO = Path("/proc/stat"), Path("/proc/cpuinfo")
# instruction sets that the speed of matrix products depends on, as /proc/cpuinfo spells them
FEATURES = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16")
FEATURES += ("amx_bf16", "amx_int8", "asimd", "asimddp", "sve", "i8mm", "bf16")
# what timings taken on one machine must share with another to hold there
IDENTITY = ("processor", "features", "torch_isa", "onednn_isa", "kernel", "gpu", "threads")
BUSY = 0.25  # cores taken by other processes above which timings mean little


class OtherLoad:
    """Count the cores that other processes take from our threads.

    Only the CPUs in the process's affinity mask are looked at. Work on those that we leave idle does not
    count: with 1 thread on 2 cores, another process may use one.
    """

    def __init__(self) -> None:
        self._last = self._read()

    def lap(self) -> float | None:
        """Return the mean number of cores taken from us since the last lap; None where the system does not
        tell."""
        before, self._last = self._last, self._read()
        if before is None or self._last is None:
            return None
        wall, busy, own = (after - earlier for after, earlier in zip(self._last, before))
        if wall <= 0:
            return None
        spare = len(_usable_cpus()) - torch.get_num_threads()
        return max(0.0, (busy - own) / wall - spare)

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Return seconds: the clock, CPU time of all processes on our CPUs, CPU time of this one and of its
        ended children."""
        names, ticks = {f"cpu{number}" for number in _usable_cpus()}, None
        try:
            for name, *fields in map(str.split, STAT.read_text().splitlines()):
                if name in names:
                    user, nice, system, _, _, irq, softirq, steal = (*map(int, fields), *[0] * 8)[:8]
                    ticks = (ticks or 0) + user + nice + system + irq + softirq + steal
        except (OSError, ValueError):
            return None
        if ticks is None:  # a container whose CPUs have other numbers here
            return None
        busy = ticks / os.sysconf("SC_CLK_TCK")
        children = os.times()
        own = time.process_time() + children.children_user + children.children_system
        return time.monotonic(), busy, own


def check_quiet(refuse: bool, seconds: float = 2.0) -> str | None:
    """Looks for `seconds` whether other processes would spoil timings.

    Args:
        refuse: raise if they would, instead of returning a warning.

    Returns:
        a warning in one line, or None.

    Raises:
        UserError: `refuse`, and the machine is busy.
    """
    load = OtherLoad()
    time.sleep(seconds)
    taken = load.lap()
    if taken is None or taken <= BUSY:
        return None
    problem = f"other processes take {taken:.1f} of the {torch.get_num_threads()} cores that are to be timed"
    if refuse:
        raise UserError(f"{problem}: end them, or set OMP_NUM_THREADS lower and repeat")
    return problem


def describe_machine(device: torch.device, dtype: torch.dtype | None = None) -> dict[str, str | int | None]:
    """Return what timings depend on besides the code, for the record.

    Keys: `processor`; `features`, the instruction sets that it has; `torch_isa` and `onednn_isa`, those that
    torch and oneDNN may use ("all" unless ONEDNN_MAX_CPU_ISA limits it); `kernel`, the variant of our own
    forward, None without it; `cores` (physical ones that this process may use), `threads`, `device`; `gpu`
    and `dtype` where there is one.
    """
    described: dict[str, str | int | None] = {
        "processor": _processor(),
        "features": _features(),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "onednn_isa": os.environ.get("ONEDNN_MAX_CPU_ISA", "all"),
        "kernel": variant(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "device": str(device),
    }
    if device.type == "cuda":
        described["gpu"] = torch.cuda.get_device_name(device)
    if dtype is not None:
        described["dtype"] = dtype_name(dtype)
    return described


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype as it is recorded, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def machine_difference(recorded: dict[str, Any], here: dict[str, Any]) -> str | None:
    """Compare two descriptions; return the first difference that decides about timings, as "name recorded,
    and this is here", or None. What an older record lacks counts as a difference."""
    for name in IDENTITY:
        if name not in recorded and name in here:
            return f"{name} unknown, and this is {here[name]}"
        if recorded.get(name) != here.get(name):
            return f"{name} {recorded.get(name)}, and this is {here.get(name)}"
    return None


def _usable_cpus() -> set[int]:
    """Return the logical CPUs in the process's affinity mask."""
    if not hasattr(os, "sched_getaffinity"):  # macOS, Windows
        return set(range(os.cpu_count() or 1))
    return os.sched_getaffinity(0)


def _processor() -> str:
    return next(iter(_cpuinfo("model name")), platform.processor() or platform.machine())


def _features() -> str:
    flags = set(next(iter(_cpuinfo("flags") or _cpuinfo("Features")), "").split())
    return " ".join(name for name in FEATURES if name in flags)


def _cpuinfo(key: str) -> list[str]:
    """Values of a key of /proc/cpuinfo, one for each logical core; none where there is no such file."""
    try:
        lines = [line.partition(":") for line in CPUINFO.read_text().split("\n")]
    except OSError:
        return []
    return [value.strip() for name, _, value in lines if name.strip() == key]
