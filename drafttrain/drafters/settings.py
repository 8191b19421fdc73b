"""Validate a drafter's settings when a recipe is read."""

import json
from dataclasses import fields

from drafttrain.drafters.config import COMMON, KINDS, DrafterConfig
from drafttrain.utils.errors import UserError
from drafttrain.utils.ranges import check_ranges


def check_settings(drafter: DrafterConfig) -> None:
    """Validate settings (see `DrafterConfig.check`)."""
    if drafter.kind not in KINDS:
        raise UserError(f"drafter.kind: must be one of {', '.join(KINDS)}, got {drafter.kind}")
    check_ranges(drafter, "drafter")
    default = DrafterConfig()
    for name in (item.name for item in fields(drafter) if item.name not in (*COMMON, *drafter.settings)):
        if (value := getattr(drafter, name)) != getattr(default, name):
            owners = [kind for kind in KINDS if name in KINDS[kind].settings]
            raise UserError(
                f"drafter.{name}: must be {json.dumps(getattr(default, name))} for kind {drafter.kind}, got "
                f"{json.dumps(value)}; it is for {', '.join(owners)}, leave it out"
            )
    if "model" in drafter.settings and drafter.model is None:
        raise UserError(f"drafter.model: must be a folder or Hub id for kind {drafter.kind}, got null")
    if "tapped_blocks" in drafter.settings and not drafter.tapped_blocks:
        raise UserError("drafter.tapped_blocks: must name at least one block, such as [-4], got []")
    if drafter.head_dtype and not drafter.train_head:
        raise UserError(
            f"drafter.head_dtype: must be null without train_head, whose head is not stored, got "
            f"{drafter.head_dtype}; leave it out"
        )
    if isinstance(drafter.init, str) and drafter.init != "random":
        raise UserError(f"drafter.init: must be random or a block's number, got {drafter.init}")
    for name in ("kv_heads", "intermediate_size") if drafter.init != "random" else ():
        if (value := getattr(drafter, name)) is not None:
            raise UserError(
                f"drafter.{name}: must be null where init names a block, whose shape the layer has, got "
                f"{value}; leave out one of the two"
            )
