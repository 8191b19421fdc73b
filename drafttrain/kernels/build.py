"""The native library: the files of cpp/, compiled once for each instruction set and kept in the user's cache.

Where there is no C++ compiler, `library()` is None and decoding uses torch's operators.
"""

import contextlib
import ctypes
import hashlib
import os
import platform
import subprocess
import sys
from functools import cache
from pathlib import Path

import torch

from drafttrain.utils.errors import UserError, brief, first_line
from drafttrain.utils.files import cache_dir

SOURCES = sorted(Path(__file__).with_name("cpp").iterdir())
AVX2 = ("-mavx2", "-mfma")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
BF16 = (*AVX512, "-mavx512bf16")
AMX = (*BF16, "-mamx-tile", "-mamx-bf16")
PLAIN = "-O3 -std=c++20 -fPIC -fvisibility=hidden -pthread -ffp-contract=off -fno-math-errno".split()
FLAGS = {"generic": (), "avx2": AVX2, "avx512": AVX512, "avx512_bf16": BF16, "amx_bf16": AMX}
BF16_PRODUCTS = ("avx512_bf16", "amx_bf16")  # instruction sets with bf16 products
INTEL = "GenuineIntel"  # vendor in /proc/cpuinfo
CHOICE = "DRAFTTRAIN_KERNELS"  # environment variable: one of FLAGS, or off
BF16_LIMITS = ("BF16", "FP16", "AMX", "AVX10")  # in names of oneDNN's instruction sets that have bf16
VNNI = {"avx2": ("avx_vnni", "-DAVX_VNNI"), "avx512": ("avx512_vnni", "-mavx512vnni")}  # products of bytes
ARGUMENTS = {  # types of the arguments of functions in cpp/, see C_TYPES
    "pack": "pnnnpn",
    "packed_bytes": "nnn",
    "advise_huge": "pn",
    "team_times": "p",
    "linear": "ppnpnn",
    "blocks": "pppnnpnppnn",
    "keys_values": "pppnn",
    "largest": "pnnnpn",
    "draws": "pnnpppp",
    "divergences": "pnpnnnppn",
    "linear_top": "ppnnppnn",
    "draft_top": "pnnnppppnpp",
    "grow_timed": "pnppdnppp",
    "grow_best": "pnpnnnnddnppp",
    "grow_drawn": "pnppnnddpn" + 7 * "p",
    "reject_drafts": "pnnnnppppppppppp",
    "append_layer": "nnn" + 14 * "p",
    "take_nodes": "nnn" + 11 * "p",
    "follow_choices": "nn" + 7 * "p",
    "commit_slots": "pnnnnnnnppnp",
}
C_TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_int64, "d": ctypes.c_double}
COUNTS = "packed_bytes draft_top grow_timed grow_best grow_drawn take_nodes follow_choices".split()


def variant() -> str | None:
    """Return the instruction set that the kernels use in this process, a key of FLAGS; None without kernels.

    It is the fastest of those that torch may use (ATEN_CPU_CAPABILITY, ONEDNN_MAX_CPU_ISA) and that the
    compiler knows.
    """
    return None if library() is None else library().variant


@cache
def library() -> ctypes.CDLL | None:
    """Load the library for this machine, compiling it first if that has not been done. If the compiler fails,
    for example because it does not know the instruction set, the next lower one is tried.

    Returns:
        None with DRAFTTRAIN_KERNELS=off, on other systems than Linux and macOS, or if it cannot be built (the
        reason is printed once). Else the library, whose attribute `variant` is its instruction set.

    Raises:
        UserError: DRAFTTRAIN_KERNELS is no instruction set, or one that this machine lacks or cannot build.
    """
    wanted = _wanted()
    if wanted is None:
        return None
    names = list(FLAGS)
    for name in reversed(names[: names.index(wanted) + 1]):
        try:
            loaded = ctypes.CDLL(str(_built(name)))
        except CompilerError as error:
            if os.environ.get(CHOICE):
                why = brief(error)
                raise UserError(f"{CHOICE}: must name what can be built, got {name} ({why})") from None
            reason = error
            continue
        except (OSError, RuntimeError, subprocess.SubprocessError) as error:
            reason = error
            break
        for function, kinds in ARGUMENTS.items():
            called = getattr(loaded, function)
            called.argtypes = [C_TYPES[kind] for kind in kinds]
            called.restype = ctypes.c_int64 if function in COUNTS else None
        loaded.variant = name
        return loaded
    print(
        f"kernels: not built ({first_line(reason)}); decoding uses torch's operators, slower", file=sys.stderr
    )
    return None


class CompilerError(RuntimeError):
    """The compiler refused the source or a flag."""


def _wanted() -> str | None:
    """Return the instruction set to build for, None for no library; building it may still fail."""
    chosen = os.environ.get(CHOICE, "")
    if chosen == "off" or os.name != "posix":
        return None
    if chosen and chosen not in FLAGS:
        raise UserError(f"{CHOICE}: must be one of {', '.join(FLAGS)} or off, got {chosen}")
    able = _instruction_set()
    if chosen and list(FLAGS).index(chosen) > list(FLAGS).index(able):
        raise UserError(f"{CHOICE}: this machine has {able}, got {chosen}; unset it")
    # Intel's vdpbf16ps multiplies fewer numbers a second than fp32 products of widened weights.
    return chosen or ("avx512" if able == "avx512_bf16" and _has(INTEL) else able)


def _instruction_set() -> str:
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return "generic"
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    capability = torch.backends.cpu.get_cpu_capability()
    lower = limit == "AVX" or limit.startswith(("SSE", "AVX2", "AVX_"))
    if capability.startswith("AVX512") and not lower:
        limited = limit.startswith(("AVX512", "AVX10"))
        if not _has("avx512_bf16") or limited and not any(part in limit for part in BF16_LIMITS):
            return "avx512"
        amx = _has("amx_bf16") and not (limited and "AMX" not in limit) and _may_use_tiles()
        return "amx_bf16" if amx else "avx512_bf16"
    return "avx2" if capability.startswith(("AVX2", "AVX512")) else "generic"


def _has(feature: str) -> bool:
    try:
        return f" {feature}" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _may_use_tiles() -> bool:
    """Ask Linux for permission to use AMX's tiles, and return whether it was given; False elsewhere."""
    arch_prctl, request, tile_data = 158, 0x1023, 18
    return sys.platform == "linux" and ctypes.CDLL(None).syscall(arch_prctl, request, tile_data) == 0


def _vnni(wanted: str) -> list[str]:
    """Return the compiler's flag for products of bytes, if this machine has them and torch may use them."""
    feature, flag = VNNI.get(wanted.partition("_")[0], ("none", ""))
    limit = (os.environ.get("ONEDNN_MAX_CPU_ISA") or "ALL").upper()
    return [flag] if _has(feature) and any(one in limit for one in ("ALL", "VNNI", *BF16_LIMITS)) else []


def _built(wanted: str) -> Path:
    """Return the path of the compiled library, compiling it if the cache has none of this source."""
    own = (*FLAGS[wanted], *_vnni(wanted), *(["-DFETCH_ALWAYS"] if _has(INTEL) else []))
    name = f"forward-{wanted}-{key(sources_hash(), *PLAIN, *own)}.so"
    folder = cache_dir() / "kernels"
    if os.path.exists(folder / name):  # False also where the folder may not be looked into
        with contextlib.suppress(OSError):  # truncated, or of another system that shares the cache
            return Path(ctypes.CDLL(str(folder / name))._name)
    from drafttrain.kernels.compiler import compile_library  # once on a machine

    return compile_library(SOURCES, folder / name, wanted, (PLAIN, own))


@cache
def sources_hash() -> str:
    """Return a hash of the C++ files."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:16]


def key(*parts: object) -> str:
    """Return a hash of these parts, the processor architecture and the C library, for a file in the cache."""
    system = platform.machine(), *platform.libc_ver()  # a home may be shared by machines
    return hashlib.sha256(" ".join(map(str, (*parts, *system))).encode()).hexdigest()[:16]
