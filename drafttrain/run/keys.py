"""Explain the keys of a recipe."""

import dataclasses
import math
import re
import shlex
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import yaml

from drafttrain.run.options import default_of, explanations, without_none
from drafttrain.run.recipe import Recipe, keys_of, section_of
from drafttrain.utils.errors import UserError, did_you_mean

# former keys, from which hours were estimated
REMOVED = {f"plan.{key}" for key in ("device_tflops", "device_gb_per_s", "utilisation", "decode_utilisation")}
# names from transformers' TrainingArguments and the like, and the key here
TRAINER_NAMES = {
    "learning_rate": "lr",
    "num_train_epochs": "epochs",
    "per_device_train_batch_size": "rows_per_batch",
    "batch_size": "rows_per_batch",
    "max_length": "row_length",
    "lr_scheduler_type": "schedule",
    "warmup_ratio": "warmup_steps",
    "optim": "optimizer",
    "adam_beta1": "adam_betas",
    "adam_beta2": "adam_betas",
}


class Key(NamedTuple):
    """A key that a recipe may hold: dotted name, type, default, explanation, for lists an override."""

    name: str
    kind: str
    default: str
    text: str
    example: str = ""


def describe_keys(cls: type = Recipe, prefix: str = "") -> Iterator[Key]:
    """Yield every key that a recipe may hold, in the dataclasses' order."""
    hints, texts = typing.get_type_hints(cls), explanations(cls)
    for item in keys_of(cls):
        section, in_list = section_of(hints[item.name])
        name, text = f"{prefix}{item.name}", texts.get(item.name, "")
        example = "" if "[]" in name else _example(name, hints[item.name], item)
        if section is None:
            yield Key(name, _type_name(hints[item.name]), _default(item), text, example)
        else:
            yield Key(name, "list" if in_list else "section", "", text, example)
            yield from describe_keys(section, f"{name}{'[]' if in_list else ''}.")


def explain_keys(section: str | None = None, cls: type = Recipe) -> str:
    """Return the explanation of a section's keys or of one key; "all": of every key; None: of the sections.

    Raises:
        UserError: there is no such section or key.
    """
    keys = list(describe_keys(cls))
    names = [key.name.replace("[]", "") for key in keys]
    shown = [key for key, name in zip(keys, names) if f"{name}.".startswith(f"{section}.")]
    if section == "all":
        shown = keys
    elif section is None:
        shown = [key for key in keys if "." not in key.name]
    if not shown:
        remedy = did_you_mean(section, [*names, "all"], "--keys alone lists the sections")
        raise UserError(f"--keys: must be a section or key of a recipe, got {section}; {remedy}")
    lines = []
    for key in shown:
        note = f", {key.default}" if key.default == "required" else key.default and f", default {key.default}"
        lines += [f"{key.name} ({key.kind}{note})", f"    {key.text}"]
        lines += [f"    such as {key.example}"] if key.example else []
    if section is None:
        lines += ["", "--keys SECTION explains the keys of one, --keys all every key."]
    return "\n".join(lines)


def remedy(cls: type, prefix: str, key: str, root: type) -> str:
    """Return a hint for an unknown key: the closest of its section, or one of its name elsewhere, or a list.

    Args:
        cls: dataclass of the section that lacks the key.
        prefix: its dotted name with a dot after it.
        root: all settings.
    """
    names = [item.name for item in keys_of(cls)]
    if f"{prefix}{key}" in REMOVED:
        return "leave it out: --dry-run estimates no hours"
    if (known := TRAINER_NAMES.get(key)) in names:
        return f"did you mean {prefix}{known}?"
    if close := did_you_mean(key, names, prefix=prefix):
        return close
    everywhere = [key.name for key in describe_keys(root)]
    if moved := [dotted for dotted in everywhere if dotted.rsplit(".", 1)[-1] == key]:
        return f"did you mean {moved[0]}?"
    return f"known here: {', '.join(names)}"


def _example(name: str, hint: Any, item: dataclasses.Field) -> str:
    """Return an override of a list as an example (lists are replaced as a whole); "" for other keys."""
    hint = without_none(hint)
    if typing.get_origin(hint) not in (list, tuple):
        return ""
    section, _ = section_of(hint)
    if section is None:
        value = default_of(item) or _placeholders(hint)
    else:
        value = [{key.name: key.name.upper() for key in keys_of(section) if _default(key) == "required"}]
    text = yaml.safe_dump(list(value), default_flow_style=True, width=math.inf, sort_keys=False).strip()
    return f"--{name} {shlex.quote(text)}"


def _placeholders(hint: Any) -> list[Any]:
    """Return values of a list: letters or ascending numbers, or pairs of numbers."""
    [item] = typing.get_args(hint)
    if typing.get_origin(item) is list:
        return [[1, 2], [3, 4]]
    return ["A", "B"] if item is str else [1, 2]


def _type_name(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return " | ".join(str(choice) for choice in typing.get_args(hint))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return " | ".join(_type_name(arg) for arg in typing.get_args(hint))
    if hint is type(None):
        return "null"
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _default(item: dataclasses.Field) -> str:
    default = default_of(item)
    if default is dataclasses.MISSING:
        return "required"
    return "null" if default is None else str(default)


def explain_type(message: str) -> str:
    """Shorten jsonargparse's message of several lines to one: which key, what was expected and what given."""
    key = ".".join(re.findall(r'Parser key "([^"]+)"', message))
    if missing := re.search(r"arguments are required: (.+)", message):
        names = [name.strip() for name in missing[1].split(",")]
        return "missing " + ", ".join(f"{key}.{name}" if key else name for name in names)
    expected = re.findall(r"Expected (?:an? )?(.+?)(?:\. Got value: .*)?$", message, re.MULTILINE)
    given = re.findall(r"(?:Got value|Given value): (.*)", message)
    if not (key and expected and given):
        return " ".join(message.split())
    expected = [_plain_type(text) for text in expected]
    return f"{key}: must be {' or '.join(dict.fromkeys(expected))}, got {given[-1].strip()}"


def _plain_type(text: str) -> str:
    """Return Python's name of a type in plain words."""
    if choices := re.fullmatch(r"typing\.Literal\[(.+)\]", text):
        return f"one of {choices[1]}".replace("'", "")
    name = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text"}
    return {**words, "NoneType": "null", "list": "a list"}.get(name, name)
