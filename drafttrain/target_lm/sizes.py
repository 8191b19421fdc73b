"""Validation of values in a target's files that transformers does not check."""

from pathlib import Path

from transformers import PreTrainedConfig

from drafttrain.utils.errors import UserError, brief
from drafttrain.utils.files import read_json

LIMITS = {"num_hidden_layers": 10_000, "vocab_size": 1 << 24, "hidden_size": 1 << 18}


def require_values(place: str, config: PreTrainedConfig) -> None:
    """Require sizes that a model can have, and token ids as `eos_token_id` of the generation config, if it
    has one.

    Raises:
        UserError: a size is out of range, or an end-of-sequence token is not an id.
    """
    for name, most in LIMITS.items():
        value = getattr(config, name, 1)
        if type(value) is not int or not 1 <= value <= most:
            raise UserError(f"{place}: {name}: must be within 1 and {most}, got {brief(repr(value))}")
    if (path := Path(place) / "generation_config.json").exists():
        settings = read_json(path)
        ends = settings.get("eos_token_id") if isinstance(settings, dict) else ""
        tokens = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if any(type(token) is not int for token in tokens):
            raise UserError(f"{path}: eos_token_id: must be token ids, got {brief(repr(ends))}")
