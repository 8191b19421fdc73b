"""Kernels of every instruction set that this machine has."""

from collections.abc import Iterator

import pytest

from drafttrain.kernels import build
from drafttrain.kernels.build import library


def variants() -> list[str]:
    """Names of the kernels that can be compiled and run here; none without a compiler."""
    able = build.variant()
    return list(build.FLAGS)[: list(build.FLAGS).index(able) + 1] if able else []


def use(variant: str, patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Use the kernels of one instruction set until the generator goes on; with AVX2 those of machines without
    VNNI, whose products of bytes AVX-512 has."""
    patch.setenv(build.CHOICE, variant)
    if variant == "avx2":
        patch.setattr(build, "VNNI", {})
    library.cache_clear()
    yield variant
    library.cache_clear()


@pytest.fixture(params=variants())
def kernels(request, monkeypatch) -> Iterator[str]:
    """Use the kernels of one instruction set for the length of a test."""
    yield from use(request.param, monkeypatch)
