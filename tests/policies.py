"""Every growth policy that has a name, with settings for small trees."""

import inspect
import typing
from collections.abc import Sequence

from drafttrain.trees.parse import policy_maker
from drafttrain.trees.policies import POLICIES

SMALL = {"length": "3", "k_config": "2-2-1", "paths": "0-1-00", "width": "2", "depth": "2", "top_k": "3"}
SMALL |= {"layer_k": "4", "max_depth": "4", "total": "7", "beta": "0.05", "min_confidence": "0.02"}


def small(name: str) -> str:
    """The policy of that name as recipes write it: with those of `SMALL` that it has, and what else has no
    default and can be written."""
    settings = {}
    for key, parameter in inspect.signature(policy_maker(name)).parameters.items():
        kind = parameter.annotation
        if key in SMALL:
            settings[key] = SMALL[key]
        elif parameter.default is parameter.empty and kind in (int, float):
            settings[key] = "1"
        elif parameter.default is parameter.empty and typing.get_origin(kind) in (tuple, Sequence):
            settings[key] = "2-1"
    return f"{name}:{','.join(f'{key}={value}' for key, value in settings.items())}"


EVERY_POLICY = [small(name) for name in POLICIES]
