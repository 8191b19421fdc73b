"""Names of the files of a bundle, and its evaluation."""

from pathlib import Path
from typing import Any

from drafttrain.utils.errors import UserError
from drafttrain.utils.files import read_json

CARD = "card.json"  # the recipe's section `export`, for the model card
README = "README.md"
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
CALIBRATION = "calibration.json"
CLASSIFIER, CLASSIFIER_WEIGHTS = "classifier.json", "classifier.safetensors"
SELF_DRAFT = ("ngrams.json", "self_draft.json")  # either, or both
GENERATE, REQUIREMENTS = "custom_generate/generate.py", "custom_generate/requirements.txt"
EVALUATION = "eval.json"
LOG = "training_log.json"


def read_evaluation(path: Path) -> dict[str, Any] | None:
    """Return the results of an evaluation, or None if there is no such file.

    Raises:
        UserError: the file does not hold results of an evaluation.
    """
    if not path.exists():
        return None
    results = read_json(path)
    is_object = isinstance(results, dict)
    if not is_object or not isinstance(results.get("tree"), str | None):
        wrong = f"tree: must be a text, got {results['tree']!r}" if is_object else "must be an object"
        raise UserError(f"{path}: {wrong}; give what drafttrain benchmark RECIPE wrote")
    return results
