"""The growth policies of a bundle that can be used on this machine."""

import warnings
from collections.abc import Sequence

from drafttrain.bundle import Bundle
from drafttrain.inference.proposer import Proposer
from drafttrain.utils.errors import UserError


def usable_proposers(bundle: Bundle, trees: Sequence[str]) -> dict[str, Proposer]:
    """Return a bundle's drafter with each of several growth policies. One that cannot be used here (PCT with
    a drafter slower than its target) is left out with a warning.

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
