"""Compiling the native library, once on a machine."""

import atexit
import contextlib
import ctypes
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import FileLock

from drafttrain.kernels.build import CompilerError, key

SECONDS = 300  # limit of a compilation, while other ranks may be compiling too


def compile_library(
    sources: Sequence[Path], place: Path, wanted: str, options: tuple[Sequence[str], Sequence[str]]
) -> Path:
    """Compile the library and return its path: `place`, or a path in a temporary folder of this process if
    that cannot be written.

    Args:
        sources: its files; those that are compiled end in .cpp.
        wanted: the instruction set.
        options: options of the compiler: those for all instruction sets, and those for this one.

    Raises:
        CompilerError: the compiler refuses the source or a flag, now or in an earlier run.
        RuntimeError: there is no compiler.
        subprocess.TimeoutExpired: a file takes longer than `SECONDS`.
    """
    plain, own = options
    flags, folder, name = [*plain, *own], place.parent, place.name
    compilers = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    compiler = next((found for found in map(shutil.which, filter(None, compilers)) if found), None)
    if compiler is None:
        raise RuntimeError("no C++ compiler: install g++ or clang++")
    which = Path(compiler).resolve()
    refused = folder / f"refused-{wanted}-{key(which, which.stat().st_mtime_ns, *flags)}"
    how_often = "once"
    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 0):
                raise OSError(errno.EACCES, "no library can be loaded from it")
            scratch = tempfile.mkdtemp(dir=folder)
            held.callback(shutil.rmtree, scratch, ignore_errors=True)
            held.enter_context(FileLock(folder / f".{name}.lock"))  # of several ranks one compiles
        except OSError as error:
            held.close()
            how_often = f"at every start: {folder} cannot be used ({error.strerror}); set DRAFTTRAIN_CACHE"
            folder = Path(scratch := tempfile.mkdtemp())
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        if os.path.exists(refused):  # already reported by an earlier run, or by another rank
            raise CompilerError(refused.read_text(encoding="utf-8"))
        if is_loadable(place):
            return place
        print(f"kernels: compiling for {wanted}, {how_often}", file=sys.stderr)
        built = Path(scratch) / name
        try:
            compiled = [source for source in sources if source.suffix == ".cpp"]
            compiled.sort(key=lambda source: -source.stat().st_size)  # what takes longest is started first
            objects = {str(source): f"{scratch}/{source.stem}.o" for source in compiled}
            commands = [[*flags, "-c", source, "-o", to] for source, to in objects.items()]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(lambda arguments: _compile(compiler, arguments), commands))
            _compile(compiler, ["-shared", "-pthread", *objects.values(), "-o", str(built)])
            with open(built, "rb+") as file:
                os.fsync(file.fileno())  # half a library would crash a process that loads it
            os.replace(built, folder / name)
        except CompilerError as error:
            nothing = ["-c", "-x", "c++", os.devnull, "-o", str(built)]
            if _accepts(compiler, [*plain, *nothing]) and not _accepts(compiler, [*flags, *nothing]):
                with contextlib.suppress(OSError):  # it does not know the instruction set
                    refused.write_text(str(error), encoding="utf-8")
            raise
    return folder / name


def is_loadable(place: Path) -> bool:
    """Return whether there is a library: one may be cut off, or of another system that shares the cache."""
    with contextlib.suppress(OSError):
        return os.path.exists(place) and ctypes.CDLL(str(place)) is not None
    return False


def _accepts(compiler: str, arguments: list[str]) -> bool:
    try:
        _compile(compiler, arguments)
    except CompilerError:
        return False
    return True


def _compile(compiler: str, arguments: list[str]) -> None:
    """Run the compiler.

    Raises:
        CompilerError: it fails.
    """
    done = subprocess.run([compiler, *arguments], capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise CompilerError(f"{compiler}: {(done.stderr.strip() or 'failed').splitlines()[0]}")
