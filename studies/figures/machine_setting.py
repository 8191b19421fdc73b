"""The drafter, prompts and sizes that the figures of the machine are measured with."""

from pathlib import Path

from drafttrain.bundle import Bundle, load_bundle
from drafttrain.kernels.machine import dtype_name
from drafttrain.target_lm.model import FrozenTarget

DRAFTER = Path("model_cards/smollm2-135m-edd")
RECIPE = "recipes/quickstart.yaml"
TUNING = "data/tuning_prompts.jsonl"
MT_BENCH = "data/eval/mt_bench.jsonl"
NEW_TOKENS = 96
REPEATS = 3


def load(bundle: Path = DRAFTER) -> Bundle:
    """Load a bundle in the mode that users get without options."""
    return load_bundle(bundle, dtype="auto")


def in_dtype(target: FrozenTarget) -> dict[str, str]:
    """Return the dtype of what was measured, for the record of the machine."""
    return {"dtype": dtype_name(target.dtype)}
