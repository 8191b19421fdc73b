"""Settings with a choice of words, declared by their types: `mode: Literal["pipedec", "stpp", "pp"]`."""

from dataclasses import fields
from typing import Any, Literal, get_args, get_origin

from drafttrain.utils.errors import UserError


def check_choices(settings: Any, section: str = "") -> None:
    """Require every text in a dataclass to be one that the type of its field allows.

    Recipes are checked when they are read; this also checks settings that programs construct.

    Args:
        section: section of the recipe, for the error message.

    Raises:
        UserError: a field has another text.
    """
    for item in fields(settings):
        value, known = getattr(settings, item.name), _words(item.type)
        if known and isinstance(value, str) and value not in known:
            key = f"{section}.{item.name}" if section else item.name
            raise UserError(f"{key}: must be one of {', '.join(known)}, got {value}")


def _words(kind: Any) -> list[str]:
    """Return the words of the `Literal`s in a type; empty if there are none."""
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    return [word for one in get_args(kind) for word in _words(one)]
