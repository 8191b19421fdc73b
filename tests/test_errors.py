"""Errors that users can cause are one line, `<what>: <constraint>, got <value>`, and name the key.

The first part reads every `UserError(…)` of the package; `python -m studies.messages FOLDER` lists those that
are not in form. The second gives every number of a recipe a value that it cannot have.
"""

import ast
import dataclasses
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from drafttrain.run import cli
from drafttrain.run.recipe import Recipe
from studies import messages

# Numbers that may be negative: places counted from the end.
SIGNED = {"drafter.tapped_blocks", "hidden_states.tapped_blocks", "drafter.init"}


def of(code: str, tmp_path: Path) -> messages.Raised:
    path = tmp_path / "x.py"
    path.write_text(code)
    [found] = messages.raised(path, tmp_path)
    return found


def test_every_message_is_one_line_without_internal_objects():
    errors = list(messages.all_raised())
    assert len(errors) > 300
    assert {one.place: fault for one in errors if (fault := one.fault())} == {}


def test_messages_have_the_form():
    wrong = [f"{one.place}: {one.text}" for one in messages.all_raised() if not one.in_form()]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "message, good",
    [
        ('"training.lr: must be above 0, got {x}"', True),
        ('f"{key}: must be one of {names}, got {x}; leave it out"', True),
        ('f"{path}: no such file"', True),
        ('f"{path}: damaged ({error}); make it again"', True),
        ('f"{path}: {error}"', True),
        ('f"training.lr is {x}: it must be above 0"', False),
        ('f"corpus.max_length: {x} is too small; at least 2 is needed"', False),
        ('"evaluate.prompts is missing; name some"', False),
        ('f"{path}: damaged"', False),
        ('f"{n} tokens are too many"', False),
    ],
)
def test_forms(message, good, tmp_path):
    assert of(f"raise UserError({message})", tmp_path).in_form() is good


@pytest.mark.parametrize(
    "code, fault",
    [
        ('UserError("a\\nb")', "a line break"),
        ('UserError(" a")', "blanks"),
        ('UserError(f"a {self}")', "object self"),
        ('UserError(f"a {target.name}")', None),
        ("try:\n    pass\nexcept RuntimeError as e:\n    raise UserError(f'a: {e}')", "RuntimeError"),
        ("try:\n    pass\nexcept (OSError, KeyError) as e:\n    raise UserError(f'a: {e}')", None),
        ("try:\n    pass\nexcept RuntimeError as e:\n    raise UserError(f'a: {brief(e)}')", None),
        ("UserError(message)", None),
    ],
)
def test_faults(code, fault, tmp_path):
    found = of(code, tmp_path).fault()
    assert found is None if fault is None else fault in found


def test_templates():
    text = '"a " f"{x!r} b" + (y if z else "c")'
    assert messages.template(ast.parse(text, mode="eval").body)[0] == "a {} b{}"


def numbers(cls: type = Recipe, prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield path and type of every number of a recipe; "[]" follows the name of a list of sections."""
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        if not item.init:
            continue
        hint = hints[item.name]
        inside = [one for one in leaves(hint) if dataclasses.is_dataclass(one)]
        path = (*prefix, item.name)
        if inside:
            yield from numbers(inside[0], (*path, "[]") if typing.get_origin(hint) is list else path)
        elif {int, float} & set(leaves(hint)) and str not in leaves(hint):
            yield path, hint


def leaves(hint: Any) -> list[Any]:
    """List the plain types within a union, list or tuple."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType, list, tuple):
        return [leaf for one in typing.get_args(hint) for leaf in leaves(one)]
    return [hint]


def dotted(path: tuple[str, ...]) -> str:
    return ".".join(path).replace(".[]", "")


def wrong_values(path: tuple[str, ...], hint: Any) -> dict[str, Any]:
    """Return a value of another type, and values out of range, by what is wrong with them."""
    size = next((len(typing.get_args(h)) for h in [hint] if typing.get_origin(h) is tuple), 1)
    several = any(typing.get_origin(h) in (list, tuple) for h in (hint, *typing.get_args(hint)))
    values: dict[str, Any] = {"type": "fast", "mapping": {"a": 1}}
    if dotted(path) not in SIGNED:
        values["negative"] = -7
    if float in leaves(hint):
        values["not a number"] = float("nan")
    return {why: [v] * size if several and not isinstance(v, dict) else v for why, v in values.items()}


def recipe_with(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """Return a recipe that is right but for one value."""
    recipe: dict[str, Any] = {"target": {"model": "x"}}
    recipe["corpus"] = {"sources": [{"path": "chats.jsonl"}], "max_length": 256}
    recipe["regenerate"] = {"sources": [{"path": "chats.jsonl"}], "server": {"url": "http://localhost:1/v1"}}
    recipe["classifier"] = {"prompts": {"name": "x", "path": "chats.jsonl"}}  # checks nothing without
    needed = {"sources": {"path": "chats.jsonl"}, "prompts": {"name": "x", "path": "chats.jsonl"}}
    needed["tune_prompts"] = needed["prompts"]
    place: Any = recipe
    for i, name in enumerate(path[:-1]):
        if name == "[]":
            continue
        is_list = path[i + 1] == "[]"
        if name not in place or is_list:
            place[name] = [dict(needed[name])] if is_list else dict(needed.get(name, {}))
        place = place[name][0] if is_list else place[name]
    place[path[-1]] = value
    return recipe


def answer(recipe: dict[str, Any], file: Path, capsys) -> tuple[int, list[str]]:
    """Give a recipe to `drafttrain run`, which runs nothing; return exit status and lines of the error."""
    file.write_text(yaml.safe_dump(recipe))
    status = cli.main(["run", str(file), "--only", "nothing"])
    captured = capsys.readouterr()
    assert not captured.out
    return status, captured.err.strip().split("\n")


def test_the_recipe_is_right_but_for_the_value(tmp_path, capsys):
    recipe = recipe_with(("seed",), 1)
    status, lines = answer(recipe, tmp_path / "recipe.yaml", capsys)
    assert status == 2 and len(lines) == 1 and "nothing: no such stage" in lines[0]


def test_wrong_numbers_of_a_recipe_are_refused_by_their_key(tmp_path, capsys):
    accepted = []
    for path, hint in numbers():
        for why, value in wrong_values(path, hint).items():
            status, lines = answer(recipe_with(path, value), tmp_path / "recipe.yaml", capsys)
            assert status == 2 and len(lines) == 1, (dotted(path), value, lines)
            assert lines[0].startswith("drafttrain: ") and "Traceback" not in lines[0]
            if path[-1] not in lines[0] or "no such stage" in lines[0]:
                accepted.append(f"{dotted(path)} {why} ({value}): {lines[0]}")
    assert not accepted, "\n".join(accepted)


def test_all_numbers_are_found():
    found = {dotted(path) for path, _ in numbers()}
    assert {"training.lr", "corpus.sources.max_conversations", "regenerate.server.concurrency"} <= found
    assert {"training.adam_betas", "evaluate.prompts.limit", "seed"} <= found and len(found) > 60
