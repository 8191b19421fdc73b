"""Growth policies as recipes and the command line write them: `eagle2:top_k=4,max_depth=5,total=12`.

A list is written with dashes: `static:k_config=3-2-1`. PCT and `timed` take what drafting and verifying cost
from a calibration, C2T its classifier from the bundle, and its threshold from a calibration if there is one.
"""

import difflib
import inspect
import math
import typing
from collections.abc import Callable, Sequence
from typing import Any

from drafttrain.trees.c2t import C2tPolicy, Confidence
from drafttrain.trees.cape import CapePolicy
from drafttrain.trees.chain import ChainPolicy
from drafttrain.trees.costs import Costs
from drafttrain.trees.eagle2 import Eagle2Policy
from drafttrain.trees.interface import TreePolicy
from drafttrain.trees.pct import PctPolicy
from drafttrain.trees.static import StaticPolicy
from drafttrain.trees.timed import TimedPolicy
from drafttrain.utils.errors import UserError

POLICIES: dict[str, Callable[..., TreePolicy]] = {
    "chain": ChainPolicy,
    "static": StaticPolicy.from_k_config,
    "paths": StaticPolicy.from_text,
    "vct": StaticPolicy.vanilla,
    "eagle1": StaticPolicy.eagle1,
    "cape": CapePolicy,
    "eagle2": Eagle2Policy,
    "pct": PctPolicy,
    "timed": TimedPolicy,
    "c2t": C2tPolicy,
    "c2t_chain": C2tPolicy.chain,
    "joint": C2tPolicy.joint,
    "dymax": C2tPolicy.dymax,
    "dyjoint": C2tPolicy.dyjoint,
}
# what these take from a calibration; C2T can do without
CALIBRATED = {"pct": Costs.for_pct, "timed": Costs.for_timed, "c2t": Costs.for_c2t}
# what a setting that is written out replaces of it: C2T with a beta of one's own is the paper's
REPLACED = {
    "pct": ("threshold", {"draft_seconds", "verify_seconds"}),
    "c2t": ("beta", {"expand", "top_k"}),
}
CLASSIFIED = ("c2t", "c2t_chain")  # these take a trained classifier


def parse_policy(
    text: str,
    costs: Costs | None = None,
    confidence: Confidence | None = None,
    others: Sequence[str] = (),
) -> TreePolicy:
    """The policy that a text such as `chain:length=4` or `timed` names.

    Args:
        costs: of drafting and verifying on this machine, for `pct`, `timed` and `c2t`.
        confidence: a trained classifier, for `c2t` and `c2t_chain`.
        others: what the caller takes beside these policies, to name it in the error.

    Raises:
        UserError: no such policy or setting, a value it cannot have, or costs or a classifier are needed and
            missing.
    """
    name, _, rest = text.partition(":")
    if name not in POLICIES:
        known = [*POLICIES, *others]
        close = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(known)}"
        raise UserError(f"tree {text!r}: there is no policy {name!r}; {hint}")
    make = POLICIES[name]
    kinds = typing.get_type_hints(make.__init__ if inspect.isclass(make) else make)
    names = [key for key in inspect.signature(make).parameters if kinds[key] not in (Any, Confidence)]
    settings: dict[str, Any] = {}
    if name in CLASSIFIED:
        if confidence is None:
            raise UserError(
                f"tree {text!r} takes a classifier and there is none; train one with drafttrain c2t"
            )
        settings["confidence"] = confidence
    settings |= _calibrated(text, costs)
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if key not in names or not equals:
            close = difflib.get_close_matches(key, names, 1)
            hint = f"; did you mean {close[0]}?" if close and equals else ""
            raise UserError(f"tree {text!r}: {part!r} is none of {', '.join(f'{n}=…' for n in names)}{hint}")
        try:
            settings[key] = _value(value, kinds[key])
        except ValueError:
            raise UserError(f"tree {text!r}: {value!r} is no value for {key}") from None
    try:
        return make(**settings)
    except TypeError:
        missing = [n for n, p in inspect.signature(make).parameters.items() if p.default is p.empty]
        missing = ", ".join(key for key in missing if key not in settings)
        remedy = "run drafttrain calibrate first" if name in CALIBRATED else "write them after a colon"
        raise UserError(f"tree {text!r}: {missing} is missing; {remedy}") from None


def uses_calibration(text: str, costs: Costs | None) -> bool:
    """Whether the policy that a text names takes something from these costs that the text does not give."""
    given = {part.partition("=")[0] for part in text.partition(":")[2].split(",")}
    return bool(_calibrated(text, costs).keys() - given)


def _calibrated(text: str, costs: Costs | None) -> dict[str, Any]:
    """The settings that a policy has from these costs, unless the text gives them."""
    name, _, rest = text.partition(":")
    if costs is None or name not in CALIBRATED:
        return {}
    setting, replaced = REPLACED.get(name, ("", set()))
    given = setting in {part.partition("=")[0] for part in rest.split(",")}
    found = CALIBRATED[name](costs)
    return {key: value for key, value in found.items() if not (given and key in replaced)}


def _value(text: str, kind: Any) -> Any:
    """A number, a list of numbers joined by dashes, or none, as the annotation says."""
    options = typing.get_args(kind)
    if type(None) in options and text == "none":
        return None
    if typing.get_origin(kind) in (tuple, Sequence):
        return tuple(_value(item, options[0]) for item in text.split("-"))
    if kind is int or int in options:
        number = int(text)
    elif kind is float or float in options:
        number = float(text)
    elif kind is str:
        return text
    else:
        raise ValueError(text)
    if not 0 <= number < math.inf:  # NaN fails too
        raise ValueError(text)
    return number
