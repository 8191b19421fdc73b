"""Kernels of every instruction set that this machine has."""

import pytest

from drafttrain.kernels import build
from drafttrain.kernels.build import library


def variants() -> list[str]:
    """Names of the kernels that can be compiled and run here; none without a compiler."""
    able = build.variant()
    return list(build.FLAGS)[: list(build.FLAGS).index(able) + 1] if able else []


@pytest.fixture(params=variants())
def kernels(request, monkeypatch) -> str:
    """Use the kernels of one instruction set for the length of a test; with AVX2 those of machines without
    VNNI, whose products of bytes AVX-512 has."""
    monkeypatch.setenv(build.CHOICE, request.param)
    if request.param == "avx2":
        monkeypatch.setattr(build, "VNNI", {})
    library.cache_clear()
    yield request.param
    library.cache_clear()
