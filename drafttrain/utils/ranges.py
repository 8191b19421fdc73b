"""Ranges of numeric settings, declared with the fields: `lr: float = setting(1e-4, gt=0)`."""

import math
import operator
from dataclasses import MISSING, field, fields
from typing import Any

from drafttrain.utils.errors import UserError

SIGNS = {
    "ge": (operator.ge, ">="),
    "gt": (operator.gt, ">"),
    "le": (operator.le, "<="),
    "lt": (operator.lt, "<"),
}


def setting(
    default: Any = MISSING, *, default_factory: Any = MISSING, metadata: dict | None = None, **bounds: float
) -> Any:
    """Return a dataclass field whose number, or every number of its list, has to be within bounds.

    Args:
        metadata: further metadata of the field.
        bounds: some of ge, gt, le, lt, as in pydantic; they always allow None, and never infinity.
    """
    if bounds and not bounds.keys() & {"le", "lt"}:
        bounds["lt"] = math.inf
    metadata = {**(metadata or {}), "bounds": bounds}
    return field(default=default, default_factory=default_factory, metadata=metadata)


def check_ranges(settings: Any, section: str = "") -> None:
    """Require the numbers of a dataclass to be within the bounds that its fields declare.

    Args:
        section: section of the recipe, for the error message.

    Raises:
        UserError: a number is not; NaN never is.
    """
    for item in fields(settings):
        value, bounds = getattr(settings, item.name), item.metadata.get("bounds", {})
        for number in value if isinstance(value, list | tuple) else [value]:
            if number is not None and not all(SIGNS[name][0](number, bounds[name]) for name in bounds):
                shown = [name for name in bounds if bounds[name] < math.inf or not number < math.inf]
                words = " and ".join(f"{SIGNS[name][1]} {bounds[name]:.10g}" for name in shown)
                given = list(value) if isinstance(value, tuple) else value
                key = f"{section}.{item.name}" if section else item.name
                raise UserError(f"{key}: must be {words}, got {given}")
