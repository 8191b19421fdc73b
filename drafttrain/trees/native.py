"""Growth of trees in one native call, for drafters that support it."""

from collections.abc import Callable
from typing import Any

import torch

from drafttrain.trees.drafter import Drafter
from drafttrain.trees.tree import TokenTree


def grow_natively(
    drafter: Drafter, grow: Callable, state: object, root: torch.Tensor, *given: Any
) -> TokenTree | None:
    """Return the trees of `grow`, a function of `kernels/growth.py`; None if the drafter cannot use it."""
    native = getattr(drafter, "grow_natively", None)
    fields = native and native(grow, state, root, *given)
    return fields and TokenTree.of_fields(fields, torch.full_like(root, fields[0].shape[1]))
