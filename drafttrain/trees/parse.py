"""Growth policies by name, as recipes and the command line write them: `eagle2:top_k=4,max_depth=5,total=12`.

A list is written with dashes: `static:k_config=3-2-1`. The settings are the policy's parameters. Its method
`calibrated` returns those that a calibration supplies; a parameter of type `Confidence` is filled with the
bundle's classifier.
"""

import inspect
import math
import typing
from collections.abc import Callable, Sequence
from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING, Any

from drafttrain.trees.interface import Confidence, TreePolicy
from drafttrain.trees.policies import POLICIES, drafter_policy
from drafttrain.utils.errors import UserError, did_you_mean

if TYPE_CHECKING:  # only some policies use costs
    from drafttrain.trees.costs import Costs


def policy_maker(name: str) -> Callable[..., TreePolicy]:
    """Return the class, or the class method, that constructs the policy of this name."""
    module, *names = POLICIES[name].split(".")
    return reduce(getattr, names, import_module(f"drafttrain.trees.{module}"))


def parse_policy(
    text: str,
    costs: "Costs | None" = None,
    confidence: Confidence | None = None,
    others: Sequence[str] = (),
) -> TreePolicy:
    """Return the policy that a text such as `chain:length=4` or `timed` names.

    Args:
        costs: of drafting and verifying on this machine, for policies that need a calibration.
        confidence: a trained classifier, for policies that need one.
        others: further names that the caller accepts, for the error message.

    Raises:
        UserError: no such policy or setting, a value out of range, or costs or a classifier are missing.
    """
    name, _, rest = text.partition(":")
    if name in others:
        raise UserError(f"tree {text!r}: must be {name} without settings, got {rest}; leave them out")
    if name not in POLICIES:
        known = [*POLICIES, *others]
        hint = did_you_mean(name, known, f"choose one of {', '.join(known)}")
        raise UserError(f"tree {text!r}: there is no policy {name!r}; {hint}")
    make = policy_maker(name)
    settings = _calibrated(text, costs)
    for key, kind in _parameters(make).items():
        if kind is Confidence:
            if confidence is None:
                raise UserError(f"tree {text!r}: needs a classifier; train one with drafttrain c2t")
            settings[key] = confidence
    settings |= _written(text, rest, _parameters(make))
    required = [key for key, p in inspect.signature(make).parameters.items() if p.default is p.empty]
    if missing := [key for key in required if key not in settings]:
        remedy = "write them after a colon"
        if takes_costs(text):
            remedy = "run drafttrain calibrate first"
        raise UserError(f"tree {text!r}: {', '.join(missing)} is missing; {remedy}")
    try:
        return make(**settings)
    except UserError as error:
        raise UserError(f"tree {text!r}: {error}") from None


def uses_calibration(text: str, costs: "Costs | None") -> bool:
    """Return whether a policy takes a setting from these costs, because its text does not give it."""
    return bool(_calibrated(text, costs).keys() - _given(text))


def takes_costs(text: str) -> bool:
    """Return whether the policy of this text has settings that a calibration supplies; an unknown one, and a
    variant made by a method, has none."""
    name = drafter_policy(text).partition(":")[0]
    make = policy_maker(name) if name in POLICIES else None
    is_policy = inspect.isclass(make) and issubclass(make, TreePolicy)
    return is_policy and make.calibrated.__func__ is not TreePolicy.calibrated.__func__


def takes_classifier(text: str) -> bool:
    """Return whether the policy of this text needs a trained classifier; an unknown one needs none."""
    name = drafter_policy(text).partition(":")[0]
    return name in POLICIES and Confidence in _parameters(policy_maker(name)).values()


def _parameters(make: Callable[..., TreePolicy]) -> dict[str, Any]:
    """Return the types of a policy's parameters by name."""
    kinds = typing.get_type_hints(make.__init__ if inspect.isclass(make) else make)
    return {key: kinds[key] for key in inspect.signature(make).parameters}


def _given(text: str) -> set[str]:
    """Return the names of the settings that a text gives, except those that it sets to none."""
    parts = (part.partition("=") for part in text.partition(":")[2].split(","))
    return {name for name, _, value in parts if value != "none"}


def _calibrated(text: str, costs: "Costs | None") -> dict[str, Any]:
    """Return the settings that a policy takes from these costs."""
    if costs is None or not takes_costs(text):
        return {}
    return policy_maker(drafter_policy(text).partition(":")[0]).calibrated(costs, _given(text))


def _written(text: str, rest: str, kinds: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a text gives, parsed.

    Raises:
        UserError: an unknown setting, or a value of another type.
    """
    names = [key for key, kind in kinds.items() if kind is not Confidence]
    settings = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if key not in names or not equals:
            close = did_you_mean(key, names) if equals else ""
            hint = close and f"; {close}"
            known = ", ".join(f"{name}=…" for name in names)
            raise UserError(f"tree {text!r}: must have settings of {known}, got {part!r}{hint}")
        if key in settings:
            raise UserError(f"tree {text!r}: {key}: must be given once, got it again; keep one")
        try:
            settings[key] = _value(value, kinds[key])
        except ValueError:
            kind = getattr(kinds[key], "__name__", kinds[key])
            raise UserError(f"tree {text!r}: {key}: must be {kind}, got {value!r}") from None
    return settings


def _value(text: str, kind: Any) -> Any:
    """Parse the value of a setting: a number, a list of numbers joined by dashes, a text or none."""
    options = typing.get_args(kind)
    if type(None) in options and text == "none":
        return None
    if typing.get_origin(kind) in (tuple, Sequence):
        return tuple(_value(item, options[0]) for item in text.split("-"))
    if kind is str:
        return text
    for number in (int, float):
        if kind is number or number in options:
            value = number(text)
            if number is int or math.isfinite(value):  # an int may be too large for `isfinite`
                return value
    raise ValueError(text)
