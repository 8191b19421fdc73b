"""Words of settings, declared by their types: `mode: Literal["pipedec", "stpp", "pp"]`."""

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin

from drafttrain.utils.errors import UserError


def check_choices(settings: Any, section: str = "") -> None:
    """Require the words of a dataclass to be among those that its fields' types allow.

    Recipes are checked as they are read; programs construct settings themselves.

    Args:
        section: of the recipe, for the error.

    Raises:
        UserError: one is not.
    """
    for item in fields(settings):
        value, known = getattr(settings, item.name), _words(item.type)
        if known and isinstance(value, str) and value not in known:
            key = f"{section}.{item.name}" if section else item.name
            raise UserError(f"{key}: must be one of {', '.join(known)}, got {value}")


def _words(kind: Any) -> list[str]:
    """Return the words that a type allows; none where it allows no or any words."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [word for one in get_args(kind) for word in _words(one)]
