"""Values from JSON files, compared with the type hints of the dataclasses that hold them."""

import dataclasses
import functools
import types
import typing
from typing import Any, Literal

LARGEST = 2**63  # larger numbers would overflow where floats or tensors are computed from them


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of a type such as `dict[str, list[float]] | None`, its parts included.

    An int is also a float; a bool is neither. Numbers have to be finite and below 2^63.
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if origin is list:
        if inner[0] is int:  # token ids: many
            return isinstance(value, list) and all(type(one) is int and abs(one) < LARGEST for one in value)
        return isinstance(value, list) and all(fits(one, inner[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(
            fits(key, inner[0]) and fits(one, inner[1]) for key, one in value.items()
        )
    if hint in (int, float):
        return type(value) in (int, hint) and abs(value) < LARGEST
    if dataclasses.is_dataclass(hint):
        return type(value) is hint and misfit(value) is None
    return hint is Any or type(value) is hint


def misfit(value: Any) -> str | None:
    """Return the name of the first field of a dataclass whose value is not of its type; None if all are."""
    hints = _hints(type(value))
    return next((name for name, hint in hints.items() if not fits(getattr(value, name), hint)), None)


def check_types(value: Any) -> None:
    """Require every field of a dataclass to be of its type.

    Raises:
        TypeError: one is not.
    """
    if (name := misfit(value)) is not None:
        raise TypeError(f"{name} is of the wrong type or not finite")


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields by name."""
    hints = typing.get_type_hints(cls)
    return {item.name: hints[item.name] for item in dataclasses.fields(cls)}
