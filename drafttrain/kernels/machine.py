"""Descriptions of the machine of a measurement: processor, instruction sets in use, threads."""

import os
import platform
from pathlib import Path

import torch

from drafttrain.kernels.build import variant
from drafttrain.utils.threads import usable_cores

CPUINFO = Path("/proc/cpuinfo")
# instruction sets that the speed of matrix products depends on, as /proc/cpuinfo spells them
FEATURES = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16")
FEATURES += ("amx_bf16", "amx_int8", "asimd", "asimddp", "sve", "i8mm", "bf16")


def describe_machine(
    device: torch.device, dtype: torch.dtype | None = None, native: bool = True
) -> dict[str, str | int | None]:
    """Return what timings depend on besides the code, for the record.

    Keys: `processor`; `features`, the instruction sets that it has; `torch_isa` and `onednn_isa`, those that
    torch and oneDNN may use ("all" unless ONEDNN_MAX_CPU_ISA limits it); `kernel`, the variant of our own
    forward, None without it or if it is not used (`native`); `cores` (physical ones that this process may
    use), `threads`, `device`; `gpu` and `dtype` where there is one.
    """
    described: dict[str, str | int | None] = {
        "processor": _processor(),
        "features": _features(),
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "onednn_isa": os.environ.get("ONEDNN_MAX_CPU_ISA", "all"),
        "kernel": variant() if native else None,
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
    """Return the recorded name of a dtype, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _processor() -> str:
    parts = [next(iter(_cpuinfo(f"CPU {part}")), "") for part in ("implementer", "part", "variant")]
    arm = f"{platform.machine()} {' '.join(parts)}" if all(parts) else platform.processor()  # of Linux on ARM
    return next(iter(_cpuinfo("model name")), arm or platform.machine())


def _features() -> str:
    flags = set(next(iter(_cpuinfo("flags") or _cpuinfo("Features")), "").split())
    return " ".join(name for name in FEATURES if name in flags)


def _cpuinfo(key: str) -> list[str]:
    """Return the values of a key of /proc/cpuinfo, one per logical core; empty if there is no such file."""
    try:
        lines = [line.partition(":") for line in CPUINFO.read_text().split("\n")]
    except OSError:
        return []
    return [value.strip() for name, _, value in lines if name.strip() == key]
