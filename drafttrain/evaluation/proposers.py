"""Find a drafter, and the growth policies of a bundle that can be used on this machine."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

from drafttrain.bundle import Bundle, find_bundle, is_plain_lm
from drafttrain.inference.proposer import Proposer
from drafttrain.utils.errors import UserError


def find_drafter(path: str | os.PathLike) -> Path:
    """Return the folder of a bundle as `find_bundle` does, or that of a small LM, or its .gguf file.

    Raises:
        UserError: there is none.
    """
    return Path(path) if is_plain_lm(path) else find_bundle(path)


def usable_proposers(bundle: Bundle, trees: Sequence[str]) -> dict[str, Proposer]:
    """Return proposers of a bundle's drafter by growth policy. A policy that cannot be used here (PCT with a
    drafter slower than its target) is left out with a warning.

    Raises:
        UserError: none can be used.
    """
    proposers, problem = {}, None
    for tree in trees:
        try:
            proposers[tree] = bundle.proposer(tree)
        except UserError as error:
            problem = error
            warnings.warn(f"{tree} is left out: {error}", stacklevel=2)
    if problem and not proposers:
        raise problem
    return proposers
