"""Kernels of every instruction set that this machine has."""

import pytest

from drafttrain.kernels import library


def variants() -> list[str]:
    """Names of the kernels that can be compiled and run here; none without a compiler."""
    able = library.variant()
    return list(library.FLAGS)[: list(library.FLAGS).index(able) + 1] if able else []


@pytest.fixture(params=variants())
def kernels(request, monkeypatch) -> str:
    """Use the kernels of one instruction set for the length of a test."""
    monkeypatch.setenv(library.CHOICE, request.param)
    library.library.cache_clear()
    yield request.param
    library.library.cache_clear()
