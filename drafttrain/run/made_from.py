"""Records of what a stage's folder was made from, for `stage.json`: settings as JSON, and how they differ."""

import dataclasses
import json
from typing import Any

from drafttrain.run.options import default_of


def plain(value: Any, known: Any = None) -> Any:
    """Return a settings value as JSON, without the fields whose metadata has `changes_output: False`.

    Args:
        known: an earlier record of the value. Fields that it lacks are left out if they are at their default,
            and "auto" in a field marked `settled` becomes the recorded value. None: there is no record.
    """
    if isinstance(value, dict):
        return {key: plain(item, _inside(known, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, _inside(known, i)) for i, item in enumerate(value)]
    if not dataclasses.is_dataclass(value):
        return value
    kept = {}
    for item in dataclasses.fields(value):
        inner, before = getattr(value, item.name), _inside(known, item.name)
        is_new = isinstance(known, dict) and item.name not in known
        if is_new and plain(inner) == plain(default_of(item)):
            continue
        if item.metadata.get("changes_output", True):
            is_settled = inner == "auto" and before is not None and item.metadata.get("settled")
            kept[item.name] = before if is_settled else plain(inner, before)
        elif before is not None:  # recorded by a version in which the field changed the output
            kept[item.name] = before
    return kept


def _inside(known: Any, key: str | int) -> Any:
    """Return the value of an earlier record at a key or index; None if it has none."""
    try:
        return known[key]
    except (KeyError, IndexError, TypeError):
        return None


def as_json(value: Any) -> Any:
    """Return a value after a round trip through JSON: keys become strings, tuples become lists."""
    return json.loads(json.dumps(value))


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """List what differs between two `made_from` records, in words: settings first, then inputs."""
    before, after = _flat(old["section"]), _flat(new["section"])
    keys = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    found = [f"{key}: {_short(before.get(key))} → {_short(after.get(key))}" for key in keys]
    names = {**old["inputs"], **new["inputs"]}
    return found + [f"{name} changed" for name in names if old["inputs"].get(name) != new["inputs"].get(name)]


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return `{"training.lr": 1}` for `{"training": {"lr": 1}}`."""
    if not isinstance(value, dict):
        return {prefix: value}
    flat = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{prefix}.{key}" if prefix else key)
    return flat


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"
