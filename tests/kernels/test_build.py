"""The library is compiled once, for the instruction set that torch uses, or not at all."""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from drafttrain.kernels import build
from drafttrain.kernels.build import library
from drafttrain.kernels.compiler import compile_library
from drafttrain.utils.errors import UserError


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """An empty cache folder, and nothing loaded."""
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))
    library.cache_clear()
    yield tmp_path / "cache" / "kernels"
    library.cache_clear()


@pytest.fixture
def small(fresh, monkeypatch, tmp_path):
    """Sources whose functions do nothing, compiled in a moment: what is kept, asked again and said does not
    depend on what they do."""
    (folder := tmp_path / "cpp").mkdir()
    names = list(build.ARGUMENTS)
    for name, functions in (("linear", names[::2]), ("trees", names[1::2])):
        lines = (f'__attribute__((visibility("default"))) void {function}() {{}}' for function in functions)
        (folder / f"{name}.cpp").write_text("\n".join(['extern "C" {', *lines, "}\n"]))
    monkeypatch.setattr(build, "SOURCES", sorted(folder.iterdir()))
    build.sources_hash.cache_clear()
    yield fresh
    build.sources_hash.cache_clear()


def refusing(folder: Path, arguments: str, message: str) -> str:
    """Make a compiler that refuses arguments of a pattern of the shell; return its path."""
    real = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))))
    made = folder / "c++"
    made.write_text(
        f'#!/bin/sh\ncase "$*" in {arguments}) echo "{message}" >&2; exit 1;; esac\nexec {real} "$@"\n'
    )
    made.chmod(0o755)
    return str(made)


def kept(folder: Path) -> list[Path]:
    """Files in the cache, lock files left out."""
    return [path for path in folder.iterdir() if path.suffix != ".lock"]


COMPILER = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here")


@needs_compiler
def test_the_fastest_kernels_that_can_be_compiled_are_used():
    """Else thousands of tests would be skipped, or run slower kernels, unnoticed."""
    names = list(build.FLAGS)
    able = [
        name
        for name in names[: names.index(build._wanted()) + 1]
        if not subprocess.run(
            [COMPILER, *build.FLAGS[name], "-x", "c++", "-c", "/dev/null", "-o", "/dev/null"]
        ).returncode
    ]
    assert build.variant() == able[-1]


@needs_compiler
def test_it_is_compiled_once(fresh, capfd, monkeypatch):
    """The real files with the real flags."""
    monkeypatch.setenv(build.CHOICE, "generic")
    assert build.variant() == "generic"
    assert capfd.readouterr().err == "kernels: compiling for generic, once\n"
    [built] = kept(fresh)  # and nothing else is left behind
    library.cache_clear()
    assert build.variant() == "generic" and capfd.readouterr().err == ""
    assert kept(fresh) == [built]


@needs_compiler
def test_processes_that_start_together_compile_it_once(small, capfd):
    place, options = small / "forward.so", (build.PLAIN, build.FLAGS["generic"])
    arguments = build.SOURCES, place, "generic", options
    work = [threading.Thread(target=compile_library, args=arguments) for _ in range(3)]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    assert capfd.readouterr().err == "kernels: compiling for generic, once\n"
    assert kept(small) == [place]


@needs_compiler
def test_a_cache_that_no_library_can_be_loaded_from(small, capfd, monkeypatch):
    """As on a disk that is mounted with noexec."""
    monkeypatch.setenv(build.CHOICE, "generic")
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert build.variant() == "generic"
    assert "at every start: " in (err := capfd.readouterr().err) and err.count("\n") == 1


@needs_compiler
def test_an_unwritable_cache_costs_a_compilation(small, capfd, monkeypatch, tmp_path):
    monkeypatch.setenv(build.CHOICE, "generic")
    (tmp_path / "cache").write_text("a file where the folder should be")
    assert build.variant() == "generic"
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith("kernels: compiling for generic, at every start: ") and "DRAFTTRAIN_CACHE" in line


def test_without_a_compiler_there_is_one_line(fresh, capfd, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert library() is None and build.variant() is None
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and "install g++ or clang++" in err


@needs_compiler
def test_a_compiler_that_fails_leaves_nothing_behind(fresh, capfd, monkeypatch, tmp_path):
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'out of luck' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    assert library() is None
    assert "out of luck" in capfd.readouterr().err and kept(fresh) == []


@needs_compiler
def test_an_old_compiler_builds_for_what_it_knows(small, capfd, monkeypatch, tmp_path):
    """As g++ 10 does, which does not know AMX."""
    monkeypatch.setenv("CXX", refusing(tmp_path, "*-mavx*", "error: unrecognized option"))
    monkeypatch.setattr(build, "_instruction_set", lambda: "avx512")
    assert build.variant() == "generic" and library().variant == "generic"
    lines = capfd.readouterr().err.splitlines()
    assert lines == [f"kernels: compiling for {name}, once" for name in ("avx512", "avx2", "generic")]
    names = sorted(path.name.rpartition("-")[0] for path in kept(small))
    assert names == ["forward-generic", "refused-avx2", "refused-avx512"]
    library.cache_clear()  # the next start asks for nothing again
    assert build.variant() == "generic" and capfd.readouterr().err == ""
    library.cache_clear()
    monkeypatch.setenv(build.CHOICE, "avx2")
    with pytest.raises(UserError, match="DRAFTTRAIN_KERNELS: must name what can be built, got avx2 .*option"):
        library()


@needs_compiler
def test_a_compiler_that_failed_for_another_reason_is_asked_again(small, capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", refusing(tmp_path, "*-mavx*linear.cpp*", "no space left"))
    monkeypatch.setattr(build, "_instruction_set", lambda: "avx2")
    assert build.variant() == "generic"
    assert [path.name.split("-")[1] for path in kept(small)] == ["generic"]
    capfd.readouterr()
    library.cache_clear()
    assert build.variant() == "generic"
    assert capfd.readouterr().err == "kernels: compiling for avx2, once\n"


def test_it_can_be_switched_off(fresh, monkeypatch):
    monkeypatch.setenv(build.CHOICE, "off")
    assert library() is None


def test_an_unknown_instruction_set_is_an_error(fresh, monkeypatch):
    monkeypatch.setenv(build.CHOICE, "sse9")
    with pytest.raises(UserError, match="DRAFTTRAIN_KERNELS: must be one of generic, .* got sse9"):
        library()


def test_an_instruction_set_that_the_machine_lacks_is_an_error(fresh, monkeypatch):
    monkeypatch.setattr(build, "_instruction_set", lambda: "avx2")
    monkeypatch.setenv(build.CHOICE, "avx512")
    with pytest.raises(UserError, match="this machine has avx2, got avx512"):
        library()


@pytest.mark.parametrize(
    ("capability", "limit", "features", "wanted"),
    [
        ("AVX512", "", "avx512_bf16 amx_bf16", "amx_bf16"),
        ("AVX512", "ALL", "avx512_bf16 amx_bf16", "amx_bf16"),
        ("AVX512", "AVX512_CORE_AMX", "avx512_bf16 amx_bf16", "amx_bf16"),
        ("AVX512", "AVX512_CORE_BF16", "avx512_bf16 amx_bf16", "avx512_bf16"),
        ("AVX512", "", "avx512_bf16", "avx512_bf16"),
        ("AVX512", "", "", "avx512"),
        ("AVX512", "AVX512_CORE", "avx512_bf16 amx_bf16", "avx512"),
        ("AVX512", "AVX512_CORE_BF16", "avx512_bf16", "avx512_bf16"),
        ("AVX512", "AVX2", "avx512_bf16 amx_bf16", "avx2"),
        ("AVX512", "AVX", "avx512_bf16 amx_bf16", "avx2"),
        ("AVX512", "AVX10_1_512", "avx512_bf16 amx_bf16", "avx512_bf16"),
        ("AVX512", "AVX10_1_512_AMX", "avx512_bf16 amx_bf16", "amx_bf16"),
        ("AVX2", "", "avx512_bf16", "avx2"),
        ("AVX2", "AVX2", "", "avx2"),
        ("DEFAULT", "", "", "generic"),
    ],
)
@pytest.mark.parametrize("permitted", [True, False])
def test_it_follows_torch(monkeypatch, capability, limit, features, wanted, permitted):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    monkeypatch.setattr(build, "_has", lambda feature: feature in features.split())
    monkeypatch.setattr(build, "_may_use_tiles", lambda: permitted)
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert build._instruction_set() == ("avx512_bf16" if wanted == "amx_bf16" and not permitted else wanted)


@pytest.mark.parametrize(
    ("features", "able", "wanted"),
    [
        ("AuthenticAMD avx512_bf16", "avx512_bf16", "avx512_bf16"),
        ("GenuineIntel avx512_bf16", "avx512_bf16", "avx512"),
        ("GenuineIntel avx512_bf16 amx_bf16", "amx_bf16", "amx_bf16"),
        ("GenuineIntel", "avx512", "avx512"),
    ],
)
def test_vdpbf16ps_is_used_where_it_is_fast(monkeypatch, features, able, wanted):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(build, "_has", lambda feature: feature in features.split())
    monkeypatch.setattr(build, "_may_use_tiles", lambda: True)
    monkeypatch.setattr(build.platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.delenv(build.CHOICE, raising=False)
    assert (build._instruction_set(), build._wanted()) == (able, wanted)
    monkeypatch.setenv(build.CHOICE, able)
    assert build._wanted() == able  # by name it can be had


@pytest.mark.parametrize(
    ("wanted", "features", "limit", "flags"),
    [
        ("avx512", "avx512_vnni", None, ["-mavx512vnni"]),
        ("avx512_bf16", "avx512_vnni", "", ["-mavx512vnni"]),
        ("avx512", "avx512_vnni", "AVX512_CORE_VNNI", ["-mavx512vnni"]),
        ("avx512", "avx512_vnni", "AVX512_CORE", []),
        ("avx512", "avx_vnni", None, []),
        ("avx2", "avx_vnni avx512_vnni", "AVX2_VNNI", ["-DAVX_VNNI"]),
        ("avx2", "avx_vnni avx512_vnni", "AVX2", []),
        ("avx2", "avx512_vnni", None, []),
        ("generic", "avx_vnni avx512_vnni", None, []),
    ],
)
def test_products_of_bytes_follow_the_machine_and_its_limit(monkeypatch, wanted, features, limit, flags):
    monkeypatch.setattr(build, "_has", lambda feature: feature in features.split())
    if limit is None:
        monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    else:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert build._vnni(wanted) == flags


@needs_compiler
def test_both_variables_give_avx2():
    """The variables that imitate a machine without AVX-512 imitate it here too."""
    limits = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    code = "from drafttrain.kernels.build import variant; print(variant())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **limits},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    has_avx2 = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    assert done.stdout.strip() == ("avx2" if has_avx2 else "generic")


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_compiled_again(small, capfd, monkeypatch):
    monkeypatch.setenv(build.CHOICE, "generic")
    built = build._built("generic")  # not loaded: what a process has loaded it never opens again
    assert [built] == kept(small) and capfd.readouterr().err.count("compiling") == 1
    damaged = built.with_suffix(".cut")
    damaged.write_bytes(b"not a library")
    os.replace(damaged, built)
    for compiled in (1, 0):
        library.cache_clear()
        assert build.variant() == "generic" and library()._name == str(built)
        assert capfd.readouterr().err.count("compiling") == compiled
