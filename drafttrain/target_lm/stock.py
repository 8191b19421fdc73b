"""Models as transformers loads them, without the changes that drafttrain makes for speed."""

from transformers import GenerationConfig, PreTrainedModel

from drafttrain.target_lm.loading import load_model, resolve_target
from drafttrain.target_lm.model import FrozenTarget


def load_stock_model(target: FrozenTarget) -> PreTrainedModel:
    """Return a second copy of a target's model, as transformers loads it, without our changes for speed; the
    target's own model if it was not loaded from a folder or the Hub.

    Raises:
        UserError: the model is no longer there.
    """
    place = target.model.name_or_path
    return load_model_like(place, target) if place else target.model


def load_model_like(model: str, target: FrozenTarget) -> PreTrainedModel:
    """Return any causal LM as transformers loads it, in a target's dtype and on its device, without the
    checkpoint's defaults for `generate`, such as a penalty or a cache that is off.

    Args:
        model: what `load_target` takes.

    Raises:
        UserError: as `load_target`.
    """
    loaded = load_model(resolve_target(model), target.dtype).to(target.device).eval()
    loaded.generation_config = GenerationConfig()
    return loaded
