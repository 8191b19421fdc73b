"""Comparison of machines: whether timings of one hold on another."""

from typing import Any

# keys in which two machines must agree for timings of one to hold on the other
IDENTITY = ("processor", "features", "torch_isa", "onednn_isa", "kernel", "gpu", "threads")


def machine_difference(recorded: dict[str, Any], here: dict[str, Any]) -> str | None:
    """Return the first difference between two machine descriptions that affects timings, as "name recorded,
    and this is here", or None. A key that an older record lacks counts as a difference."""
    for name in IDENTITY:
        if name not in recorded and name in here:
            return f"a machine with unknown {name}, and this is {here[name]}"
        if recorded.get(name) != here.get(name):
            return f"{name} {recorded.get(name)}, and this is {here.get(name)}"
    return None
