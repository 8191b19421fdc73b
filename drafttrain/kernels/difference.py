"""Do timings of one machine hold on another?"""

from typing import Any

# what timings taken on one machine must share with another to hold there
IDENTITY = ("processor", "features", "torch_isa", "onednn_isa", "kernel", "gpu", "threads")


def machine_difference(recorded: dict[str, Any], here: dict[str, Any]) -> str | None:
    """Compare two descriptions; return the first difference that decides about timings, as "name recorded,
    and this is here", or None. What an older record lacks counts as a difference."""
    for name in IDENTITY:
        if name not in recorded and name in here:
            return f"a machine with unknown {name}, and this is {here[name]}"
        if recorded.get(name) != here.get(name):
            return f"{name} {recorded.get(name)}, and this is {here.get(name)}"
    return None
