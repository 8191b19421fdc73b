"""Command-line options made from the dataclasses that declare the settings: name, type, default, explanation.

An option that is not given is absent from the parsed arguments, so that its dataclass or function supplies
the default.
"""

import argparse
import dataclasses
import re
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, NoReturn

from docstring_parser import parse_from_object

from drafttrain.utils.errors import UserError

NONE_MEANS = re.compile(r"^(.*?)\.? (?:null|None): (.*)$")  # the end of a field's explanation


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Help formatter: one column of options, one of explanations; several values are shown as `TREE ...`."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=26)

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs == argparse.ONE_OR_MORE:
            return f"{action.metavar or default_metavar} ..."
        return super()._format_args(action, default_metavar)


class Parser(argparse.ArgumentParser):
    """Argument parser of one command; a wrong argument gives one line instead of the whole usage text."""

    def __init__(self, name: str, **settings: Any):
        super().__init__(
            prog=f"drafttrain {name}",
            formatter_class=_Formatter,
            argument_default=argparse.SUPPRESS,
            allow_abbrev=False,
            **settings,
        )

    @property
    def options(self) -> list[str]:
        """Return the option strings, such as "--limit"."""
        return list(self._option_string_actions)

    def error(self, message: str) -> NoReturn:
        choice = re.match(r"argument (\S+): invalid choice: '(.*)' \(choose from (.*)\)", message)
        if choice:
            allowed = choice[3].replace("'", "")
            raise UserError(f"{choice[1]}: must be one of {allowed}, got {choice[2]}")
        if message.startswith("argument "):
            raise UserError(message.removeprefix("argument "))
        raise UserError(f"{message}; see {self.prog} --help")


def option(parser: argparse._ActionsContainer, shown: str, text: str, **settings: Any) -> None:
    """Add an argument as its help shows it: "--limit N", "--trees TREE ...", "--quick", "BUNDLE", "[BUNDLE]".

    A value N is a whole number >= 1. An option without a value is a switch; "--no-NAME" sets NAME to False.

    Args:
        text: its explanation.
        settings: further keywords of `add_argument`.
    """
    name, *value = shown.strip("[]").split()
    if not name.startswith("-"):
        optional = {"nargs": "?"} if shown.startswith("[") else {}
        settings = {"metavar": name, "type": filled, **optional, **settings}
        name = name.lower()
    elif value:
        settings = {"metavar": value[0], "type": positive if value[0] == "N" else filled, **settings}
        settings |= {"nargs": "+", "action": "extend"} if value[-1] == "..." else {}
    elif "choices" not in settings:
        is_off = name.startswith("--no-")
        dest = {"dest": name.removeprefix("--no-").replace("-", "_")} if is_off else {}
        settings = {"action": "store_false" if is_off else "store_true", **dest, **settings}
    parser.add_argument(name, help=text, **settings)


def add_settings(parser: argparse._ActionsContainer, cls: type, *names: str) -> None:
    """Add an option for each named field of a settings dataclass."""
    hints, texts = typing.get_type_hints(cls), explanations(cls)
    for name in names:
        item, flag = cls.__dataclass_fields__[name], flag_of(name)
        options = _options(hints[name])
        if "type" in options:
            options["metavar"] = _metavar(options["type"], name)
        text = _help(texts[name], default_of(item))
        parser.add_argument(flag, dest=name, help=text.replace("%", "%%"), **options)


def given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Return the named arguments that the user has given."""
    return {name: getattr(args, name) for name in names if name in args}


def flag_of(name: str) -> str:
    """Return the option that sets the argument of this name, such as "--max-depth" for max_depth."""
    plurals = ("bundles", "methods", "sweeps", "tasks", "temperatures")
    name = name.removesuffix("s") if name in plurals else {"start": "from"}.get(name, name)
    return f"--{name.replace('_', '-')}"


def require(args: argparse.Namespace, *names: str) -> None:
    """Raise UserError unless all of the named options were given."""
    if missing := [flag_of(name) for name in names if name not in args]:
        remedy = f"see drafttrain {args.command} --help"
        raise UserError(f"the following arguments are required: {', '.join(missing)}; {remedy}")


def refuse(args: argparse.Namespace, where: str, *names: str) -> None:
    """Raise UserError if one of the named options was given, which is not allowed `where` ("with --to")."""
    for name, value in given(args, *names).items():
        remedy = f"see drafttrain {args.command} --help"
        flag = flag_of(name).replace("--", "--no-" if value is False else "--", 1)
        raise UserError(f"{flag}: must be left out {where}, got {value}; {remedy}")


def explanations(cls: type) -> dict[str, str]:
    """Return the explanation of each field, on one line, from the docstrings of a dataclass and its bases."""
    classes = filter(dataclasses.is_dataclass, reversed(cls.__mro__))
    params = [param for one in classes for param in parse_from_object(one).params]
    return {param.arg_name: " ".join((param.description or "").split()) for param in params}


def default_of(item: dataclasses.Field) -> Any:
    """Return the default of a field; MISSING if it has none."""
    if item.default_factory is not dataclasses.MISSING:
        return item.default_factory()
    return item.default


def without_none(hint: Any) -> Any:
    """Return `X` for a type hint `X | None`, and any other hint unchanged."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return next(arg for arg in typing.get_args(hint) if arg is not type(None))
    return hint


def filled(text: str) -> str:
    """Parse a non-empty text: "", as from an unset shell variable, must not pass for an omitted option."""
    if "\0" in text:
        raise argparse.ArgumentTypeError("must be a text without NUL characters")
    if not text:
        raise argparse.ArgumentTypeError("must not be empty; leave it out for its default")
    return text


def whole(text: str) -> int:
    """Parse a whole number >= 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number >= 0, got {text}")
    return int(text)


def positive(text: str) -> int:
    """Parse a whole number >= 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text}")
    return int(text)


def number(text: str) -> float:
    """Parse a number."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, got {text}") from None


def _options(hint: Any) -> dict[str, Any]:
    """Return the keywords of `add_argument` for a field's type."""
    hint = without_none(hint)
    if hint is bool:
        return {"action": "store_true"}
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint)}
    if typing.get_origin(hint) in (list, tuple, Sequence):
        return {**_options(typing.get_args(hint)[0]), "nargs": "+", "action": "extend"}
    return {"type": {int: whole, float: number}.get(hint, filled)}


def _metavar(kind: Any, name: str) -> str:
    if kind is whole:
        return "N"
    return "X" if kind is number else name.upper()


def _help(text: str, default: Any) -> str:
    """Return a field's explanation with its default: "limit. None: all." becomes "limit (default: all)"."""
    if match := NONE_MEANS.match(text):
        text, default = match[1], match[2].rstrip(".") if default is None else default
    values = default if isinstance(default, list | tuple) else [default]
    shown = " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)
    text = text.rstrip(".")
    hidden = default is None or default is False or default is dataclasses.MISSING or default == []
    return text if hidden else f"{text} (default: {shown})"
