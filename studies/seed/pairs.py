"""The pairs of target and drafter that SEED is measured with."""

from dataclasses import dataclass

from drafttrain.bundle import is_plain_lm, load_bundle
from drafttrain.drafters.causal_lm import as_drafter
from drafttrain.drafters.model import DraftModel
from drafttrain.target_lm.loading import load_for_decoding
from drafttrain.target_lm.model import FrozenTarget

DRAFTER = "model_cards/smollm2-135m-edd-thoughts"  # of pair B, trained on trees of thoughts of other problems
DEFAULTS = {"bundle": DRAFTER, "dtype": "bfloat16"}  # of the studies' arguments


@dataclass
class Pair:
    """A target with its drafter, loaded for decoding.

    Attributes:
        name: "A" (Qwen2.5-Coder 1.5B and 0.5B, or what --pair names) or "B" (SmolLM2 and our EDD).
        source: folder or file of the drafter.
    """

    name: str
    target: FrozenTarget
    drafter: DraftModel
    source: str = ""


def load_pair(name: str, target: str | None, drafter: str, dtype: str = "bfloat16") -> Pair:
    """Load a pair; `drafter` is a bundle, or a small LM that drafts unchanged."""
    if is_plain_lm(drafter):
        loaded = load_for_decoding(target, dtype=dtype)
        small = as_drafter(drafter, loaded)
        small.pack()
        return Pair(name, loaded, small, drafter)
    bundle = load_bundle(drafter, target=target, dtype=dtype, own_calibration=False)
    return Pair(name, bundle.target, bundle.drafter, drafter)
